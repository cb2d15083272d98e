"""How Spark is started: the session, and the Java that it runs on."""
