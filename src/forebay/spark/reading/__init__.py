"""From a topic to rows: options and filters, a look at the topic, the plan of its tasks, and the task itself."""
