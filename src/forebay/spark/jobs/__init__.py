"""Jobs over topics of any size: each spreads its work with Spark, says how far it is, and ends with a report.

Every job may be ended anywhere and run again: what is done is not done twice.
"""
