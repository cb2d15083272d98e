// What a user of the generated TypeScript types writes: `node program.js URL TOKEN` prints what it saw as one JSON object.
import createClient from "openapi-fetch";
import type { components, paths } from "./forebay.js";

declare const process: { argv: string[]; stdout: { write(text: string): void } };

type RecordItem = components["schemas"]["RecordItem"];

const [url, token] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl: url, headers: { authorization: `Bearer ${token}` } });
const path = { namespace: "shop", topic: "payments" };

function known<T>(value: T | undefined): T {
  if (value === undefined) throw new Error("an answer without a body");
  return value;
}

const made = await client.PUT("/v1/topics/{namespace}/{topic}", {
  params: { path },
  body: { partitions: 1, durability: "fsync" },
});
const records: RecordItem[] = [{ value: "one", key: "anna", tag: "new" }, { value: "two" }];
const header = { "Idempotency-Key": "first" };
const append = () =>
    client.POST("/v1/topics/{namespace}/{topic}/records", { params: { path, header }, body: { records } });
await append();
// A repeat with the same key: stored once.
const appended = await append();
const page = await client.GET("/v1/topics/{namespace}/{topic}/records", {
  params: { path, query: { start: "earliest", records_max: 10 } },
});
// The route answers in other media types too, if a request accepts them: as text.
if (page.data === undefined || typeof page.data === "string") throw new Error("no page of JSON");
const read = page.data.records;
const listed = await client.GET("/v1/topics", {});
const deleted = await client.DELETE("/v1/topics/{namespace}/{topic}", { params: { path } });
const refused = await client.GET("/v1/topics/{namespace}/{topic}/records", { params: { path } });
const metrics = await client.GET("/metrics", { parseAs: "text" });
const health = await client.GET("/v1/health", {});

process.stdout.write(
  JSON.stringify({
    created: [known(made.data).name, known(made.data).durability],
    appended: known(appended.data).ranges.map((range) => [range.partition, range.first, range.count]),
    read: read.map((record) => [record.offset, record.value]),
    key: read[0]?.key,
    listed: known(listed.data).topics.map((topic) => topic.name),
    deleted: deleted.response.status,
    refused: [refused.response.status, known(refused.error).error.code],
    metrics: known(metrics.data).includes("forebay_"),
    health: known(health.data).status,
  }),
);
