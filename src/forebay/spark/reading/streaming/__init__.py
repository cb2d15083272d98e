"""Topics as Spark streams: where a query stands, how much it takes at a time, and what each micro-batch reads.

All but `reader` knows nothing of Spark.
"""
