"""The Spark data source `forebay`: what Spark asks of a source, answered by the rooms beside this one.

Spark makes the source again from its options in processes of its own, and sends it between them: it holds
plain values only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter
from pyspark.sql.types import StructType

from forebay.spark.reading.batch import Loaded, loaded_or_seen, reader_for
from forebay.spark.reading.options import ReadOptions, is_for_batch, is_for_stream
from forebay.spark.reading.schema import columns_of, spark_schema
from forebay.spark.reading.snapshot import Snapshot
from forebay.spark.reading.streaming.reader import TopicStreamReader, stream_reader
from forebay.spark.writing.writers import check_stream_sink, plan_write

if TYPE_CHECKING:
    from forebay.spark.writing.stream_writer import ForebayStreamWriter


class ForebayDataSource(DataSource):
    """`spark.read.format("forebay").option("path", …).option("topic", …).load()`."""

    _loaded: Loaded | Snapshot | None = None

    @classmethod
    def name(cls) -> str:
        """The word for `format(…)`."""
        return "forebay"

    def schema(self) -> StructType:
        """The columns asked for. Called once, by `load()`: this is the moment that the DataFrame shows."""
        streaming = is_for_stream(self.options)
        options = ReadOptions.parse(self.options, streaming=streaming)
        if is_for_batch(self.options):
            self._loaded = Loaded.now(options)
        elif not streaming:
            self._loaded = loaded_or_seen(options)
        return spark_schema(options.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read of these columns."""
        options = ReadOptions.parse(self.options)
        columns = columns_of(schema, self.options)
        # With a schema of the user's own, Spark does not ask for ours, and the moment is now.
        loaded, self._loaded = self._loaded or Loaded.now(options), None
        if isinstance(loaded, Snapshot):
            loaded = Loaded.of(loaded, options)
        return reader_for(options, loaded, columns)

    def streamReader(self, schema: StructType) -> TopicStreamReader:  # noqa: N802 - Spark's name
        """A stream of these columns."""
        return stream_reader(ReadOptions.parse(self.options, streaming=True), columns_of(schema, self.options))

    def writer(self, schema: StructType, overwrite: Any) -> DataSourceWriter:
        """A write of a DataFrame with these columns."""
        return plan_write(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: Any) -> ForebayStreamWriter:  # noqa: N802 - Spark's name
        """The sink of a streaming query with these columns."""
        check_stream_sink()
        from forebay.spark.writing.stream_writer import plan_stream_write

        return plan_stream_write(self.options, schema, overwrite=overwrite)
