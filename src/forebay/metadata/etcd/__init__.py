"""The metadata store in etcd, for processes on many machines: a thin client of its JSON gateway.

The only room that knows etcd, and loaded only by who asks for it: it needs httpx, the extra `etcd`.
`EtcdMetadata` keeps the rules of the seam; `keyspace` says where things lie, `wire` what is sent, `gateway`
how a request finds a member that answers, `refusals` what an error of etcd means, `leases` and `watch` what
lasts longer than one request.
"""

from forebay.errors import Unsupported

try:
    from forebay.metadata.etcd.store import EtcdMetadata
except ModuleNotFoundError as error:
    if error.name != "httpx":
        raise
    raise Unsupported('metadata.backend "etcd" needs httpx: install "forebay[etcd]"') from error

__all__ = ["EtcdMetadata"]
