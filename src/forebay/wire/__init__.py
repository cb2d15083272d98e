"""What goes over a connection, as bytes: bodies of requests and answers, errors, the positions of a watch.

Pure: knows records, topics, errors and the formats, and nothing of sockets, event loops or HTTP servers. A broker and
its client both use it, so each body has an encoder and a decoder.
"""
