// Records of steps and sequences: live from /debug/steps, of a recording, or of a simulated run.
// All of them are the records that the server's step log writes.
import { jsonLines } from "./api.js";

const MAX_STEPS = 20000;
const MAX_SEQUENCES = 4000;
const LIVE_EVERY_MS = 1000;
const RETRY_MS = 2000;

/** A file of `serve --record`: the scheduler's calls, from which `replay` makes the records. */
export class CallsError extends Error {}

/** The newest records, at most `MAX_STEPS` steps and `MAX_SEQUENCES` sequences. */
export class Records {
  constructor() {
    this.steps = [];
    this.sequences = new Map(); // by request and index
    this.numLost = 0;
    this.numBlocks = 0; // the largest number of free blocks so far, unless it is known
    this.explanations = new Map();
  }

  add(record) {
    if (record.kind === "step") {
      this.steps.push(record);
      this.numBlocks = Math.max(this.numBlocks, record.num_free_blocks);
      if (this.steps.length > MAX_STEPS * 1.1) this.steps.splice(0, this.steps.length - MAX_STEPS);
    } else if (record.kind === "sequence" || record.kind === "live") {
      this.sequences.set(`${record.request_id} ${record.index}`, record);
      if (this.sequences.size > MAX_SEQUENCES) this.sequences.delete(this.sequences.keys().next().value);
    } else if (record.kind === "lost") {
      this.numLost += record.num_records;
    }
  }

  get isEmpty() {
    return this.steps.length === 0 && this.sequences.size === 0;
  }

  /** The time of the first and the last record, in seconds. */
  get extent() {
    let [first, last] = [Infinity, -Infinity];
    for (const step of [this.steps[0], this.steps[this.steps.length - 1]]) {
      if (!step) continue;
      first = Math.min(first, step.committed_at_s - step.seconds);
      last = Math.max(last, step.committed_at_s);
    }
    for (const { timings } of this.sequences.values()) {
      first = Math.min(first, timings.arrival_s);
      last = Math.max(last, timings.finished_s);
    }
    return first <= last ? [first, last] : [0, 1];
  }

  static of(list, numBlocks = 0) {
    const records = new Records();
    for (const record of list) records.add(record);
    if (numBlocks) records.numBlocks = numBlocks;
    return records;
  }

  /** The records of a file: lines of JSON. Throws if it has none. */
  static ofText(text) {
    const lines = text.split("\n").filter((line) => line.trim().startsWith("{"));
    const parsed = lines.map((line) => JSON.parse(line));
    if (parsed[0]?.kind === "engine") throw new CallsError();
    const records = Records.of(parsed);
    if (records.isEmpty) throw new Error("no records");
    return records;
  }
}

/** Follow the server's steps until `signal`; live sequences are read once a second. */
export async function follow(records, signal, onState) {
  const pollLive = async () => {
    while (!signal.aborted) {
      try {
        const live = new Set();
        for await (const record of jsonLines("debug/steps?last_s=0", signal)) {
          if (record.kind !== "live") continue;
          live.add(`${record.request_id} ${record.index}`);
          records.add(record);
        }
        for (const [key, record] of records.sequences) {
          if (record.kind === "live" && !live.has(key)) records.sequences.delete(key);
        }
      } catch {
        // the other stream reports it
      }
      await delay(LIVE_EVERY_MS, signal);
    }
  };
  pollLive();
  for (let since = 30; !signal.aborted; since = 0) {
    try {
      onState("live");
      for await (const record of jsonLines(`debug/steps?follow=true&last_s=${since}`, signal)) {
        records.add(record);
        if (record.kind === "step") records.offset = performance.now() / 1e3 - record.committed_at_s;
      }
    } catch (error) {
      if (signal.aborted) return;
      onState(error.message);
    }
    await delay(RETRY_MS, signal);
  }
}

const delay = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });

/** The report that is part of this file; null if the page comes from a server. */
export async function embedded() {
  const element = document.getElementById("report");
  if (!element) return null;
  const bytes = Uint8Array.from(atob(element.textContent.trim()), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}
