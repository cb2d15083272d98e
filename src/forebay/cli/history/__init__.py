"""Jobs on Spark over the history of topics: each command of it has a module of its own."""
