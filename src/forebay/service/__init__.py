"""What a server does with each call, whatever its protocol: who may, how much at once, and where.

A front-end for HTTP, Kafka or MQTT asks here who the caller is (`tokens`), whether the caller may do it (`principals`),
whether there is room for it (`quotas`) and which broker has the shard (`placement`). Knows no protocol and no socket.
"""
