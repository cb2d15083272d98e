"""The declarations: the only home of every setting, its default, its range and its meaning."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from forebay.errors import Invalid
from forebay.settings.places import directory_at, store_at
from forebay.settings.setting import GIB, KIB, MIB, SECRET, TIB, Setting, SettingsGroup, settings_of, within

_ENDPOINT = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class WalSettings(SettingsGroup, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The write-ahead log of one shard."""

    group: ClassVar[str] = "wal"

    dir: Annotated[
        str | None,
        Meta(
            description="Where the log files lie, decided when the data directory is made. Left out: in its `shards`, "
            "beside the metadata."
        ),
    ] = None
    flush_interval_ms: Annotated[
        int,
        within(
            1,
            60_000,
            "How long a record of class `memory` may wait in the queue before it is written, if no reader follows.",
        ),
    ] = 20
    sync_interval_ms: Annotated[
        int,
        within(1, 600_000, "How often written records are synced in the background: what a power loss may take."),
    ] = 1_000
    mark_interval_ms: Annotated[
        int, within(1, 600_000, "How soon an idle shard writes down how far its log is durable.")
    ] = 1_000
    batch_bytes_max: Annotated[
        int,
        within(4 * KIB, 8 * MIB, "How much of what waits one group commit puts into one frame; appends stay whole."),
    ] = MIB
    frame_bytes_max: Annotated[
        int, within(64 * KIB, 64 * MIB, "The largest frame, and so the largest append that is atomic.")
    ] = 8 * MIB
    rotate_bytes_max: Annotated[
        int, within(4 * KIB, 4 * GIB, "A log file of this size is sealed and a new one begun.")
    ] = 64 * MIB
    rotate_seconds_max: Annotated[int, within(1, 7 * 86_400, "A log file with records is sealed at this age.")] = 300
    rotate_bytes_min: Annotated[
        int,
        within(0, 4 * GIB, "A smaller log file is not sealed at its age in mode local, where no export waits for it."),
    ] = 64 * KIB
    cache_bytes_max: Annotated[
        int, within(0, GIB, "Newest records of each shard kept in memory for readers at the tail.")
    ] = 4 * MIB
    queue_records_max: Annotated[
        int, within(1, 10_000_000, "Records that may wait to be written; beyond it appends wait.")
    ] = 100_000
    queue_bytes_max: Annotated[
        int, within(4 * KIB, 16 * GIB, "Bytes that may wait to be written; beyond it appends wait.")
    ] = 64 * MIB
    append_timeout_ms: Annotated[
        int, within(0, 3_600_000, "How long an append waits for room in a full queue before it is refused.")
    ] = 30_000
    reserve_records_min: Annotated[
        int,
        within(1, 2**32, "Smallest step in which offsets are reserved ahead: the gap an unclean stop may leave."),
    ] = 65_536
    free_bytes_min: Annotated[
        int, within(0, TIB, "Appends are refused while the file system has less free space than this.")
    ] = 64 * MIB
    reframe_bytes_min: Annotated[
        int, within(0, 64 * MIB, "A file whose mean frame is smaller is rewritten in large frames when sealed.")
    ] = 32 * KIB
    reframe_bytes_max: Annotated[
        int, within(4 * KIB, 64 * MIB, "Frames made by that rewriting; never above `wal.frame_bytes_max`.")
    ] = MIB
    producers_max: Annotated[
        int,
        within(1, 1_000_000, "Idempotent producers each shard remembers; as many keys and as many routers apart."),
    ] = 10_000
    producer_appends_max: Annotated[
        int, within(1, 100_000, "Newest appends of each idempotent producer whose repetition is recognised.")
    ] = 1_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reframe_bytes_min > self.reframe_bytes_max:
            raise Invalid(
                f"wal.reframe_bytes_min is {self.reframe_bytes_min}, above wal.reframe_bytes_max "
                f"{self.reframe_bytes_max}: rewriting would never end; lower the first or raise the second"
            )


class MemorySettings(SettingsGroup, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The memory engine (class `ephemeral`)."""

    group: ClassVar[str] = "memory"

    bytes_max: Annotated[
        int, within(4 * KIB, TIB, "Records each shard keeps in memory; beyond it the oldest are evicted.")
    ] = 256 * MIB


class MetadataSettings(SettingsGroup, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The metadata store: topics, shard states, the catalog, cursors."""

    group: ClassVar[str] = "metadata"

    backend: Annotated[
        Literal["sqlite", "memory", "etcd"],
        Meta(
            description="`sqlite` keeps it in one file; `memory` forgets it at the end of the process; "
            "`etcd` shares it between machines."
        ),
    ] = "sqlite"
    path: Annotated[
        str | None, Meta(description="The SQLite file. Left out, it is `metadata.sqlite` in the data directory.")
    ] = None
    prefix: Annotated[
        str,
        Meta(
            pattern=r"^(/[A-Za-z0-9._-]{1,100}){1,8}\Z",
            description="What every key begins with, so that several installations can share one store.",
        ),
    ] = "/forebay"
    busy_timeout_ms: Annotated[
        int, within(0, 600_000, "How long to wait for another process that is writing to the SQLite file.")
    ] = 5_000
    endpoints: Annotated[
        tuple[str, ...],
        Meta(max_length=32, description="The members of etcd as `http://host:port` or `https://host:port`."),
    ] = ()
    lease_ttl_s: Annotated[
        int, within(2, 3_600, "How long after its last sign of life a process is held for dead, where etcd says so.")
    ] = 15
    lease_margin_s: Annotated[
        int, within(0, 600, "How much earlier the process itself gives up, for clocks that do not run alike.")
    ] = 2
    request_timeout_ms: Annotated[
        int, within(100, 600_000, "How long to wait for etcd's answer before the call has failed.")
    ] = 5_000
    topic_visible_timeout_s: Annotated[
        int, within(0, 3_600, "How long creating a topic waits until reads show what was registered.")
    ] = 30
    shard_visible_timeout_s: Annotated[
        int, within(0, 3_600, "How long it then waits until the shards of the topic can be made.")
    ] = 3
    tls_ca: Annotated[
        str | None, Meta(description="Certificates (PEM) that etcd's are checked against. Left out: the system's.")
    ] = None
    tls_cert: Annotated[str | None, Meta(description="The certificate (PEM) shown to etcd.")] = None
    tls_key: Annotated[str | None, Meta(description="The private key (PEM) of `metadata.tls_cert`.")] = None
    user: Annotated[str | None, Meta(description="The user that etcd knows this process by.")] = None
    password: Annotated[
        str | None, Meta(description="That user's password; better given as `${NAME}`.", extra=SECRET)
    ] = None

    @property
    def is_file(self) -> bool:
        """Whether the metadata is a file: `metadata.path`, or else one in the data directory."""
        return self.backend == "sqlite"

    @property
    def is_served(self) -> bool:
        """Whether a service keeps the metadata, for processes on any machine."""
        return self.backend == "etcd"

    @property
    def is_volatile(self) -> bool:
        """Whether the metadata ends with this process."""
        return self.backend == "memory"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "etcd" and not self.endpoints:
            raise Invalid('metadata.backend is "etcd" without metadata.endpoints: name its members')
        for endpoint in self.endpoints:
            if not _ENDPOINT.fullmatch(endpoint):
                raise Invalid(f"metadata.endpoints names {endpoint!r}; write http://host:port or https://host:port")
        if self.lease_margin_s >= self.lease_ttl_s:
            raise Invalid(
                f"metadata.lease_margin_s is {self.lease_margin_s}, not below metadata.lease_ttl_s "
                f"{self.lease_ttl_s}: no lease would ever hold; lower the first or raise the second"
            )
        for one, other in (("tls_cert", "tls_key"), ("user", "password")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise Invalid(f"metadata.{one} and metadata.{other} go together: give both or neither")


class StorageSettings(SettingsGroup, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the history of topics is kept, and so who can go on with them."""

    group: ClassVar[str] = "storage"

    mode: Annotated[
        Literal["local", "shared_fs", "object_store"],
        Meta(
            description="`local` keeps history where it was written; `shared_fs` exports it to a directory that "
            "others see too, `object_store` to a bucket."
        ),
    ] = "local"
    handoff_root: Annotated[
        str | None,
        Meta(
            description="In mode `local`: the directory that a topic's history is exported to when the topic moves. "
            "Both sides must see it."
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode != "local" and self.handoff_root is not None:
            raise Invalid(
                f'storage.handoff_root belongs to mode "local"; in "{self.mode}" topics move by the store: leave it out'
            )
        if self.handoff_root is not None:
            msgspec.structs.force_setattr(self, "handoff_root", directory_at("storage.handoff_root", self.handoff_root))


class ExportSettings(SettingsGroup, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The way of sealed files into the store, in the background."""

    group: ClassVar[str] = "export"

    interval_s: Annotated[
        int,
        within(
            1,
            7 * 86_400,
            "How often each shard's sealed files are exported. After it was opened, the first does not wait.",
        ),
    ] = 300
    bytes_min: Annotated[
        int, within(0, TIB, "Sealed files of a shard that together have this size are exported at once.")
    ] = 64 * MIB
    at_close_seconds_max: Annotated[
        int, within(0, 3_600, "How long closing may take to export what was appended last; 0 leaves it where it is.")
    ] = 5
    sweep_interval_s: Annotated[
        int, within(1, 30 * 86_400, "How often objects that no catalog names are looked for.")
    ] = 86_400
    orphan_grace_s: Annotated[
        int,
        within(0, 365 * 86_400, "How old such an object, or an upload that was not finished, is before it is removed."),
    ] = 86_400


class RetentionSettings(SettingsGroup, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Local copies of what is in the store, never the only copy: not for mode `local`, where there is no other.

    And how often the limits of topics, which end records for good, are applied.
    """

    group: ClassVar[str] = "retention"

    check_interval_s: Annotated[int, within(1, 7 * 86_400, "How often local copies are looked through.")] = 300
    time_s: Annotated[int, within(0, 3_650 * 86_400, "Older local copies are removed.")] = 86_400
    bytes_max: Annotated[
        int, within(0, 1024 * TIB, "Local copies of one shard beyond this size are removed, oldest first.")
    ] = 10 * GIB
    grace_s: Annotated[int, within(0, 86_400, "A local copy that was read since is kept so much longer.")] = 60
    evict_interval_s: Annotated[
        int,
        within(
            1,
            86_400,
            "How often caps and times to live of topics are applied. For every mode.",
        ),
    ] = 10
    evict_share_percent: Annotated[
        int,
        within(
            1,
            100,
            "How much of a shard's live records one such pass may end because of their age, so that a clock that jumps "
            "cannot end them all; one record always may. Caps do not go by the clock and are not held back.",
        ),
    ] = 50


class StoreSettings(SettingsGroup, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The store of sealed segments: a directory, or a bucket of an object store."""

    group: ClassVar[str] = "store"

    backend: Annotated[
        Literal["directory", "s3", "gcs", "azure", "memory"],
        Meta(description="`memory` forgets everything at the end of the process."),
    ] = "directory"
    root: Annotated[
        str | None,
        Meta(
            description="The directory; or the bucket (Azure: the container) as `bucket/prefix`. Or either as a URL: "
            "`file:///path`, `s3://bucket/prefix`, `gs://…`, `az://…`; a bucket's names its backend too."
        ),
    ] = None
    options: Annotated[
        dict[str, str | int | bool],
        Meta(
            max_length=64,
            description="What the service asks for: `endpoint`, `region`, `access_key_id`, `secret_access_key`, … "
            "Secrets are better given as `${NAME}`, or left to the service's own chain of credentials.",
            extra=SECRET,
        ),
    ] = msgspec.field(default_factory=dict)
    part_bytes: Annotated[int, within(5 * MIB, GIB, "Large objects are sent in parts of this size.")] = 8 * MIB
    parts_in_flight_max: Annotated[
        int, within(1, 64, "Parts sent, or ranges fetched, at the same time; with the part size it bounds memory.")
    ] = 4
    read_ahead_bytes: Annotated[
        int, within(64 * KIB, GIB, "How much of one object may be fetched ahead of its reader.")
    ] = 8 * MIB
    request_timeout_ms: Annotated[
        int, within(100, 3_600_000, "How long one request may take before it has failed.")
    ] = 30_000
    retries_max: Annotated[int, within(0, 100, "How often a request that failed or was throttled is sent again.")] = 8
    retry_timeout_ms: Annotated[
        int, within(100, 3_600_000, "After this time a request is not sent again, however few the tries.")
    ] = 120_000

    @property
    def name(self) -> str:
        """What the catalog calls the store. A directory may be mounted elsewhere on each machine."""
        return "directory" if self.is_directory else f"{self.backend}:{self.root}"

    @property
    def is_directory(self) -> bool:
        """Whether `store.root` is a path, and not a place in an object store."""
        return self.backend == "directory"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root is not None and self.root.strip() and self.backend != "memory":
            place = store_at(self.backend, self.root)
            msgspec.structs.force_setattr(self, "backend", place.backend)
            msgspec.structs.force_setattr(self, "root", place.root)
        elif self.backend in ("s3", "gcs", "azure"):
            raise Invalid(f'store.backend is "{self.backend}" without store.root: name the bucket as bucket/prefix')
        if self.backend in ("directory", "memory") and self.options:
            raise Invalid(
                f'store.options belong to s3, gcs and azure; store.backend is "{self.backend}": leave them out'
            )


class TableSettings(SettingsGroup, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The Iceberg catalog that Spark jobs register compacted history and lakes in. A log needs none of it."""

    group: ClassVar[str] = "table"

    catalog: Annotated[
        Literal["sql", "rest", "glue"],
        Meta(description="`sql` is a database, by default a SQLite file in the warehouse."),
    ] = "sql"
    uri: Annotated[
        str | None, Meta(description="Where the catalog is: the address of its database, or of its REST service.")
    ] = None
    warehouse: Annotated[
        str | None,
        Meta(
            description="Where tables keep their metadata: a directory, or `s3://bucket/prefix`. Left out, it is "
            "`tables` in `store.root` if that is a directory, else in the data directory."
        ),
    ] = None
    options: Annotated[
        dict[str, str | int | bool],
        Meta(
            max_length=64,
            description="What the catalog and its files ask for, by the names of PyIceberg: `s3.endpoint`, `token`, … "
            "Secrets are better given as `${NAME}`. What the store has of them already is taken from there.",
            extra=SECRET,
        ),
    ] = msgspec.field(default_factory=dict)
    snapshots_kept_s: Annotated[
        int,
        within(
            0,
            3_650 * 86_400,
            "For so long a snapshot of a table works after another took its place; the next write then expires it.",
        ),
    ] = 7 * 86_400
    snapshots_kept_max: Annotated[
        int, within(1, 1_000_000, "Of more snapshots the oldest are expired as well, however young.")
    ] = 500
    orphan_grace_s: Annotated[
        int, within(0, 365 * 86_400, "How old a file of a table is that no snapshot names, before it is removed.")
    ] = 86_400


class ProgressSettings(SettingsGroup, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Commits of consumer groups that are acknowledged before they are durable."""

    group: ClassVar[str] = "progress"

    flush_interval_ms: Annotated[
        int, within(1, 600_000, 'How often commits with `ack="cached"` are written: what a crash may take of them.')
    ] = 1_000
    flush_records_min: Annotated[
        int, within(1, 2**32, "Such a commit is written at once if it moves the group by so many offsets.")
    ] = 10_000


class RuntimeSettings(SettingsGroup, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all shards of one process share."""

    group: ClassVar[str] = "runtime"

    committers: Annotated[
        int,
        within(
            1,
            64,
            "Threads that commit appends which no thread waits for; as many more for commits that wait for a new file "
            "or for metadata.",
        ),
    ] = 4
    descriptors_max: Annotated[
        int,
        within(
            8,
            1_000_000,
            "File descriptors kept open for log files, at most half of `ulimit -n`; others reopen when used.",
        ),
    ] = 16_384
    openers: Annotated[
        int, within(1, 64, "Threads that open shards at the same time when a log is recovered as a whole.")
    ] = 4
    maintenance_interval_ms: Annotated[
        int, within(1, 60_000, "How often the thread of background syncs looks for syncs and rotations that are due.")
    ] = 20
    shards_syncfs_min: Annotated[
        int, within(1, 1_000_000, "From this many dirty shards on, one sync of the file system replaces one per file.")
    ] = 64
    cache_bytes_max: Annotated[
        int,
        within(
            MIB,
            TIB,
            "Newest records of all shards together kept in memory; the shards read least recently give up theirs.",
        ),
    ] = 256 * MIB
    queue_bytes_max: Annotated[
        int,
        within(
            64 * KIB,
            TIB,
            "Bytes that may wait in all shards together; beyond it a shard takes one append per commit, others wait.",
        ),
    ] = 512 * MIB


class MetricsSettings(SettingsGroup, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is counted, and how finely."""

    group: ClassVar[str] = "metrics"

    topics: Annotated[
        tuple[str, ...],
        Meta(
            max_length=100,
            description="Topics that are counted each by itself, as patterns such as `shop/*`; at most 1,000 topics. "
            "All others are counted together, by durability class and engine.",
        ),
    ] = ()


class ServerSettings(SettingsGroup, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a server of this log is reached, by whom, and how much it takes on at the same time.

    `principal` is the name of a token: its limits count all calls with tokens of that name. A call beyond a limit is
    refused before memory is spent on it.
    """

    group: ClassVar[str] = "server"

    host: Annotated[str, Meta(min_length=1, description="The address that the server binds.")] = "127.0.0.1"
    port: Annotated[int, within(0, 65_535, "The port that the server binds; 0 takes any that is free.")] = 7878
    access: Annotated[
        Literal["tokens", "loopback", "open"],
        Meta(
            description="Which calls need a token: `tokens` all of them; `loopback` none, and only a loopback address "
            "is bound; `open` none, on any address."
        ),
    ] = "loopback"
    tls_cert: Annotated[str | None, Meta(description="The certificate (PEM) of the server. Left out: no TLS.")] = None
    tls_key: Annotated[str | None, Meta(description="The private key (PEM) of `server.tls_cert`.")] = None
    body_bytes_max: Annotated[
        int,
        within(
            KIB,
            GIB,
            "The largest body of one request, also decompressed; one partition takes wal.frame_bytes_max of it.",
        ),
    ] = 16 * MIB
    batch_records_max: Annotated[int, within(1, 10_000_000, "Records that one request may append.")] = 100_000
    url_bytes_max: Annotated[int, within(256, MIB, "The longest URL.")] = 8 * KIB
    header_bytes_max: Annotated[int, within(KIB, MIB, "All headers of a request together.")] = 32 * KIB
    headers_max: Annotated[int, within(8, 10_000, "Headers of one request.")] = 100
    request_timeout_ms: Annotated[int, within(100, 3_600_000, "How long a request may take to arrive in full.")] = (
        30_000
    )
    idle_timeout_ms: Annotated[int, within(100, 3_600_000, "How long a connection without a request is kept open.")] = (
        75_000
    )
    stall_timeout_ms: Annotated[
        int, within(100, 3_600_000, "How long a client may take nothing of what is sent to it.")
    ] = 60_000
    stop_timeout_ms: Annotated[
        int, within(0, 3_600_000, "How long a server that stops waits for the calls that are under way.")
    ] = 5_000
    wait_timeout_max_ms: Annotated[int, within(0, 3_600_000, "The longest that a read may wait for new records.")] = (
        60_000
    )
    heartbeat_interval_ms: Annotated[
        int, within(100, 600_000, "How often a stream without new records sends a sign of life.")
    ] = 15_000
    outbox_bytes_max: Annotated[
        int, within(4 * KIB, GIB, "What may wait in memory for one stream whose reader is slow.")
    ] = MIB
    connections_max: Annotated[int, within(1, 1_000_000, "Connections of all clients.")] = 10_000
    connections_per_address_max: Annotated[int, within(1, 1_000_000, "Connections from one address.")] = 1_000
    requests_max: Annotated[int, within(1, 1_000_000, "Requests under way at the same time.")] = 4_096
    requests_per_principal_max: Annotated[int, within(1, 1_000_000, "The same for one principal.")] = 1_024
    reads_waiting_per_principal_max: Annotated[
        int, within(1, 1_000_000, "Reads of one principal that may wait for a thread to read files or history.")
    ] = 64
    bytes_in_flight_max: Annotated[
        int, within(MIB, TIB, "Bodies and answers of all requests under way, which are in memory.")
    ] = 256 * MIB
    bytes_in_flight_per_principal_max: Annotated[int, within(MIB, TIB, "The same for one principal.")] = 64 * MIB
    streams_max: Annotated[int, within(1, 1_000_000, "Streams open at the same time.")] = 10_000
    streams_per_principal_max: Annotated[int, within(1, 1_000_000, "The same for one principal.")] = 1_000
    consumers_max: Annotated[
        int, within(1, 10_000_000, "Consumers of subscriptions that are attached at the same time.")
    ] = 100_000
    consumers_per_principal_max: Annotated[int, within(1, 10_000_000, "The same for one principal.")] = 10_000
    topics_max: Annotated[int, within(1, 10_000_000, "Topics that calls may create in all.")] = 100_000
    topics_per_principal_max: Annotated[
        int, within(1, 10_000_000, "Topics below the prefixes of one principal that its calls may create.")
    ] = 10_000
    requests_per_second_max: Annotated[
        int, within(0, 10_000_000, "Requests of one principal in a second, on average over a few; 0 is no limit.")
    ] = 0
    bytes_per_second_max: Annotated[
        int, within(0, TIB, "Bytes that one principal sends in a second, on average over a few; 0 is no limit.")
    ] = 0

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise Invalid("server.tls_cert and server.tls_key go together: give both or neither")
        if self.access == "loopback" and not self.is_loopback:
            raise Invalid(
                f'server.host is {self.host!a:.80} and server.access "loopback": every machine that reaches it could '
                'read and change everything; set server.access to "tokens", or to "open" if that is meant'
            )
        for less, more in (
            ("body_bytes_max", "bytes_in_flight_per_principal_max"),
            ("bytes_in_flight_per_principal_max", "bytes_in_flight_max"),
            ("requests_per_principal_max", "requests_max"),
            ("streams_per_principal_max", "streams_max"),
            ("consumers_per_principal_max", "consumers_max"),
            ("topics_per_principal_max", "topics_max"),
            ("connections_per_address_max", "connections_max"),
        ):
            if getattr(self, less) > getattr(self, more):
                raise Invalid(
                    f"server.{less} is {getattr(self, less)}, above server.{more} {getattr(self, more)}: "
                    "lower the first or raise the second"
                )


GROUPS: Mapping[str, type[SettingsGroup]] = MappingProxyType(
    {
        kind.group: kind
        for kind in (
            StorageSettings,
            WalSettings,
            MemorySettings,
            MetadataSettings,
            StoreSettings,
            ExportSettings,
            RetentionSettings,
            ProgressSettings,
            TableSettings,
            RuntimeSettings,
            MetricsSettings,
            ServerSettings,
        )
    }
)


def all_settings() -> tuple[Setting, ...]:
    """Every setting there is, group by group."""
    return tuple(setting for kind in GROUPS.values() for setting in settings_of(kind))
