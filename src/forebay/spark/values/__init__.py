"""Values as typed columns: schemas, and what decodes values by them."""
