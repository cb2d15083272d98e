"""`make demo`: a million orders, a follower, a crash, a move, a broker; all orders in Spark: read, piped, compacted."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import forebay
from demo import orders
from demo.broker import Served, serve_and_kill
from demo.crash import Crash, kill_a_writer
from demo.move import TOPIC, Move, move_a_topic
from demo.spark import Compacted, Piped, Revenue, compact_and_ask, plot, revenue_by_country, run_pipeline
from forebay.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = 1_000_000
PAYMENTS = 3_000
VISITS = 20_000
SHIPMENTS = 100_000
ROOT = Path(".demo-data")
DATA = ROOT / "shop"
PLOT = ROOT / "revenue.png"


class Follower(threading.Thread):
    """Reads the topic while it is being written and keeps count."""

    def __init__(self, topic: forebay.Topic) -> None:
        super().__init__(name="follower")
        self._topic = topic
        self.stop = threading.Event()
        self.records = 0
        self.bytes = 0

    def run(self) -> None:
        for record in self._topic.follow(forebay.EARLIEST, stop=self.stop):
            self.records += 1
            self.bytes += len(record.value or b"")
            if self.records == ORDERS:
                return


def produce_and_follow() -> tuple[int, float]:
    """Append a million orders while a follower reads them; what they are worth, and the seconds it took."""
    with forebay.open(str(DATA)) as log:
        topic = log.create_topic("shop/orders", partitions=2, durability="disk")
        log.create_topic("shop/payments", durability="fsync")
        follower = Follower(topic)
        follower.start()
        made = list(orders.batches(ORDERS))
        begun = time.perf_counter()
        for batch in made:
            topic.append_many(batch.values, keys=batch.keys, tags=batch.tags, timestamps=batch.timestamps)
        topic.flush()
        seconds = time.perf_counter() - begun
        follower.join(60)
        follower.stop.set()
        follower.join()
        say(f"appended {ORDERS:,} orders in {seconds:.1f} s ({ORDERS / seconds:,.0f} per second), synced")
        say(f"a follower read {follower.records:,} of them ({follower.bytes / 1e6:,.0f} MB) meanwhile")
        check("the follower saw every order", holds=follower.records == ORDERS)
        return sum(batch.cents for batch in made), seconds


def serve_over_http() -> Served:
    """Serve a directory, use it over HTTP, kill the broker."""
    served = serve_and_kill(str(ROOT / "served"), VISITS)
    say(f"a client appended {served.acknowledged:,} visits to a broker; a follower read {served.followed:,} of them")
    say(f"the broker was killed with -9 and started again: {served.found:,} found, lost {served.lost}")
    check("the follower saw every visit", holds=served.followed == served.acknowledged)
    check("no acknowledged visit is lost", holds=served.lost == 0)
    return served


def crash_and_recover() -> Crash:
    """Kill a writer, show what recovery found."""
    crash = kill_a_writer(str(DATA), PAYMENTS)
    say(f"a writer with 4 threads was killed with -9 after {crash.acknowledged:,} acknowledged payments")
    say(f"recovery: {crash.decision}")
    say(f"acknowledged {crash.acknowledged:,}, recovered {crash.recovered:,}, lost {crash.lost}")
    check("no acknowledged payment is lost", holds=crash.lost == 0)
    return crash


def seal_and_move() -> Move:
    """Move a topic to another data directory and read one stream across both."""
    move = move_a_topic(ROOT, SHIPMENTS)
    say(f"north/ took {SHIPMENTS:,} shipments; a reader came to {move.acknowledged:,} and its cursor was kept")
    sealing_ms = move.sealing_seconds * 1000
    say(f"north/ sealed it at {move.sealed_at:,} in {sealing_ms:.0f} ms: {move.objects} objects in history/")
    say(f"south/ goes on: {move.decision}; it took {SHIPMENTS:,} more")
    check("the reader resumed in south/ where it had come to in north/", holds=move.resumed_at == move.acknowledged)
    say(f"one stream in south/: {move.from_history:,} from history, {move.from_log:,} from its own log")
    halves = (move.sealed_at, move.from_history, move.from_log)
    check("the stream has every shipment once, in order, without a gap", holds=halves == (SHIPMENTS,) * 3)
    return move


def read_in_spark(spark: SparkSession, cents: int) -> Revenue:
    """Aggregate the whole topic in Spark and compare with what was produced."""
    revenue = revenue_by_country(spark, DATA)
    say(f"Spark read {revenue.orders:,} orders in {revenue.seconds:.1f} s:")
    for country, count, euros in revenue.rows:
        print(f"       {country}  {count:>9,} orders  {euros:>16,.2f} EUR")
    check("Spark's totals equal what was produced", holds=revenue.orders == ORDERS and revenue.cents == cents)
    return revenue


def pipe_in_spark(spark: SparkSession) -> Piped:
    """Put the orders through the declared pipeline and look at what came out."""
    piped = run_pipeline(spark, DATA)
    say(f"demo/revenue.yml summed them by minute and country in {piped.seconds:.1f} s: {piped.records:,} records")
    check("its topic and its table hold the same rows, each once", holds=piped.topic == piped.table)
    check("no row was written twice", holds=piped.records == len(piped.topic))
    return piped


def compact_in_spark(spark: SparkSession, piped: Piped) -> Compacted:
    """Compact the orders and ask the same question again."""
    compacted = compact_and_ask(spark, DATA)
    before, after = compacted.bytes_before / 1e6, compacted.bytes_after / 1e6
    say(f"compacted {before:,.0f} MB of frames into {after:,.0f} MB of Parquet in {compacted.seconds:.1f} s")
    say(f"the same aggregation over forebay.spark.table took {compacted.reading_seconds:.1f} s")
    closed = {minute: worth for minute, worth in compacted.minutes.items() if minute in piped.topic}
    check("it says what the pipeline said of every minute that is over", holds=closed == piped.topic)
    total = sum(count for count, _ in compacted.minutes.values())
    check("and has every order, those of the last minutes too", holds=total == ORDERS)
    plot(compacted.minutes, PLOT)
    say(f"plotted in {PLOT}")
    return compacted


def say(text: str) -> None:
    print(f"  ·  {text}", flush=True)


def check(claim: str, *, holds: bool) -> None:
    print(f"  {'✓' if holds else '✗'}  {claim}", flush=True)
    if not holds:
        sys.exit(f"the demo failed: it is not true that {claim}")


def main() -> None:
    begun = time.perf_counter()
    shutil.rmtree(ROOT, ignore_errors=True)
    print(f"\nForebay {forebay.__version__}, data in {ROOT}/\n\nProduce and consume")
    cents, seconds = produce_and_follow()
    print("\nCrash and recover")
    crash = crash_and_recover()
    print("\nSeal and move")
    move = seal_and_move()
    print("\nServe and follow over HTTP")
    served = serve_over_http()
    spark = session("forebay-demo")
    print("\nRead the orders in Spark")
    revenue = read_in_spark(spark, cents)
    print("\nPut them through a pipeline")
    piped = pipe_in_spark(spark)
    print("\nCompact them and ask again")
    compacted = compact_in_spark(spark, piped)
    spark.stop()
    print("\nSummary")
    print(f"  {ORDERS:>12,}  orders appended, {ORDERS / seconds:,.0f} per second")
    print(f"  {crash.acknowledged:>12,}  payments acknowledged before kill -9, {crash.lost} lost")
    print(f"  {move.from_history + move.from_log:>12,}  shipments in one stream across two directories, 0 missing")
    print(f"  {served.acknowledged:>12,}  visits acknowledged over HTTP before kill -9, {served.lost} lost")
    print(f"  {revenue.orders:>12,}  orders in Spark, worth {revenue.cents / 100:,.2f} EUR")
    print(f"  {piped.records:>12,}  minutes of revenue in a topic and a table, by a stream, each once")
    share = compacted.bytes_after / compacted.bytes_before
    print(f"  {share:>12.0%}  of the bytes of history left by compaction, and the same answers from it")
    print(f"  {time.perf_counter() - begun:>12.1f}  seconds in all\n")
    print(f'Look around: .venv/bin/forebay --data {DATA} topic list   (and "forebay --help")')
    print(f"             .venv/bin/forebay --data {ROOT}/south --settings {ROOT}/shared.yaml topic show {TOPIC}")
    print(f"             {PLOT}, and demo/revenue.yml, which is the whole pipeline")


if __name__ == "__main__":
    main()
