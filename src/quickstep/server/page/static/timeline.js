// The timeline: what each step did, and where the time of each request went.
import { html, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "./html.js";
import { getJson } from "./api.js";
import { LineChart, colour } from "./charts.js";
import { CallsError, Records, follow } from "./records.js";
import { Tenants } from "./tenants.js";
import { T } from "./texts.js";

const WINDOWS = [5, 15, 60];
const REDRAW_MS = 100;
const LANES = ["prefill", "decode", "speculation"];
const LANE_HEIGHT = 46;
const ROW_HEIGHT = 16;
const MAX_ROWS = 40;
const LABEL_WIDTH = 76;
const MAX_POINTS = 1500;

export function Timeline({ report }) {
  const [run, setRun] = useState(0);
  const live = useRef(null);
  const [records, setRecords] = useState(() => (report ? recordsOf(report.runs[0]) : new Records()));
  const [source, setSource] = useState(report ? report.runs[0]?.name : "");
  const [state, setState] = useState(report ? "" : T.connecting);
  const [range, setRange] = useState(null); // fixed by the user; null for the newest seconds
  const [seconds, setSeconds] = useState(report ? 0 : 15); // 0 for all
  const [isPaused, setPaused] = useState(Boolean(report));
  const [selected, setSelected] = useState(null);
  const [byTenant, setByTenant] = useState(false);
  const [version, redraw] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    if (report || source) return undefined;
    const stopping = new AbortController();
    live.current = records;
    follow(records, stopping.signal, setState);
    return () => stopping.abort();
  }, [source]);
  useEffect(() => {
    if (isPaused) return undefined;
    const timer = setInterval(redraw, REDRAW_MS);
    return () => clearInterval(timer);
  }, [isPaused]);

  const extent = records.extent;
  const now = !isPaused && records.offset !== undefined
    ? Math.max(extent[1], performance.now() / 1e3 - records.offset) : extent[1];
  const frozen = useRef(null);
  if (!isPaused || !frozen.current) frozen.current = seconds ? [now - seconds, now] : [extent[0], now];
  const visible = range ?? (isPaused && !source && !report ? frozen.current : seconds ? [now - seconds, now] : [extent[0], now]);
  const steps = useMemo(() => stepsWithin(records.steps, visible), [version, records, visible[0], visible[1]]);
  const origin = source || report ? extent[0] : 0;

  const zoom = (next) => {
    setRange(next);
    if (next && !source) setPaused(true);
  };
  const open = async (event) => {
    const [file] = event.target.files;
    if (!file) return;
    try {
      const opened = Records.ofText(await file.text());
      setRecords(opened);
      setSource(file.name);
      setRange(null);
      setSeconds(0);
      setPaused(true);
      setState("");
    } catch (error) {
      setState(error instanceof CallsError ? T.callsFile(file.name) : T.badFile(file.name));
    }
    event.target.value = "";
  };
  const backToLive = () => {
    setRecords(new Records());
    setSource("");
    setRange(null);
    setSeconds(15);
    setPaused(false);
  };
  const chooseRun = (place) => {
    setRun(place);
    setRecords(recordsOf(report.runs[place]));
    setSource(report.runs[place].name);
    setRange(null);
  };
  const columns = useMemo(() => thinned(steps), [steps]);
  const sequences = sequencesWithin(records, visible);
  const rows = rowsOf(sequences, byTenant);
  const chart = { range: visible, onRange: zoom, origin };
  return html`
    <div class="timeline" tabindex="-1" onKeyDown=${(event) => {
      if (event.key === " " && event.target.tagName === "DIV") { event.preventDefault(); setPaused(!isPaused); }
    }}>
      <div class="controls">
        ${report ? html`
          <label>${T.runs} <select value=${run} onChange=${(event) => chooseRun(Number(event.target.value))}>
            ${report.runs.map((item, place) => html`<option value=${place}>${item.name}</option>`)}
          </select></label>`
        : source ? html`<button type="button" onClick=${backToLive}>${T.backToLive}</button>`
        : html`<button type="button" aria-pressed=${String(isPaused)}
            onClick=${() => { setPaused(!isPaused); setRange(null); }}>${isPaused ? T.resume : T.pause}</button>`}
        <label>${T.seconds} <select value=${seconds} onChange=${(event) => { setSeconds(Number(event.target.value)); setRange(null); }}>
          ${WINDOWS.map((value) => html`<option value=${value}>${value}</option>`)}
          <option value="0">${T.everything}</option></select></label>
        <label><input type="checkbox" checked=${byTenant} onChange=${(event) => setByTenant(event.target.checked)} /> ${T.byTenant}</label>
        ${!report && html`<label class="button">${T.openRecording}
          <input type="file" accept=".jsonl,.ndjson,.json" onChange=${open} /></label>`}
        <span class="state" role="status">${source ? (report ? "" : T.recording(source)) : isPaused ? T.paused : state === "live" ? T.live : state}
          ${records.numLost > 0 && T.lost(records.numLost)}</span>
        <${Now} steps=${steps} records=${records} />
      </div>
      ${records.isEmpty && html`<p class="note">${T.noRecords}</p>`}
      <p class="note">${T.selectHint}</p>
      <${Steps} steps=${steps} range=${visible} selected=${selected} onSelect=${setSelected} onRange=${zoom} version=${version} />
      <${Requests} rows=${rows} byTenant=${byTenant} range=${visible} selected=${selected} onSelect=${setSelected} onRange=${zoom} version=${version} />
      <${Details} selected=${selected} records=${records} isLive=${!source && !report} onClose=${() => setSelected(null)} />
      <div class="grid">
        <${LineChart} ...${chart} title=${T.kvBlocks} names=${[T.usedBlocks, T.freeBlocks]} steps=${true}
          data=${[columns.time, columns.free.map((free) => records.numBlocks - free), columns.free]} />
        <${LineChart} ...${chart} title=${T.batch} names=${[T.running, T.waitingRequests]} steps=${true}
          data=${[columns.time, columns.running, columns.waiting]} />
        <${LineChart} ...${chart} title=${T.stepTimes} names=${[T.measured, T.predicted]}
          data=${[columns.time, columns.measured, columns.predicted]} />
      </div>
      <${Tenants} sequences=${sequences} />
      <${RequestList} records=${records} origin=${origin} onSelect=${setSelected} />
    </div>`;
}

function recordsOf(run) {
  const records = Records.of(run?.records ?? [], run?.num_blocks);
  for (const [id, sentence] of Object.entries(run?.sentences ?? {})) records.explanations.set(id, sentence);
  return records;
}

/** The steps that ran in a range, by binary search: they are in the order of their ends. */
function stepsWithin(steps, [from, to]) {
  const firstAfter = (time) => {
    let [low, high] = [0, steps.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle].committed_at_s < time) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  return steps.slice(firstAfter(from), firstAfter(to) + 1);
}

/** Columns of the charts; of many steps, every n-th. */
function thinned(steps) {
  const every = Math.max(1, Math.ceil(steps.length / MAX_POINTS));
  const some = steps.filter((_, place) => place % every === 0 || place === steps.length - 1);
  return {
    time: some.map((step) => step.committed_at_s),
    free: some.map((step) => step.num_free_blocks),
    running: some.map((step) => step.num_running),
    waiting: some.map((step) => step.num_waiting),
    measured: some.map((step) => step.seconds * 1e3),
    predicted: some.map((step) => step.predicted_s * 1e3),
  };
}

function Now({ steps, records }) {
  const last = steps[steps.length - 1];
  if (!last) return null;
  const duration = Math.max(last.committed_at_s - steps[0].committed_at_s, 1e-9);
  const tokens = steps.reduce((sum, step) => sum + step.num_decode_tokens - step.num_drafts + step.num_accepted, 0);
  const items = [
    [T.running, last.num_running], [T.waitingRequests, last.num_waiting],
    ["KV", `${records.numBlocks - last.num_free_blocks}/${records.numBlocks}`],
    ["tokens/s", (tokens / duration).toFixed(0)], [T.stepsPerSecond, (steps.length / duration).toFixed(0)],
  ];
  return html`<dl class="figures">${items.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** A colour of its own for each request, the same everywhere. */
function requestColour(id) {
  let hash = 0;
  for (let place = 0; place < id.length; place += 1) hash = (hash * 31 + id.charCodeAt(place)) | 0;
  return `hsl(${Math.abs((hash * 137.508) % 360)} 60% 50%)`;
}

/** A canvas over a range of time, drawn by `draw(context, width, x)`; `find` gives what is at a point. */
function TimeCanvas({ label, height, range, draw, find, onSelect, onRange }) {
  const canvas = useRef(null);
  const dragged = useRef(null);
  const xOf = (width) => (time) => LABEL_WIDTH + ((time - range[0]) / (range[1] - range[0] || 1)) * (width - LABEL_WIDTH);
  const timeAt = (pixel, width) => range[0] + ((pixel - LABEL_WIDTH) / (width - LABEL_WIDTH)) * (range[1] - range[0]);
  const paint = () => {
    const element = canvas.current;
    const width = element.clientWidth;
    const scale = devicePixelRatio || 1;
    if (element.width !== Math.round(width * scale)) element.width = Math.round(width * scale);
    if (element.height !== Math.round(height * scale)) element.height = Math.round(height * scale);
    const context = element.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    draw(context, width, xOf(width));
  };
  useLayoutEffect(paint);
  const point = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top, box.width];
  };
  return html`<canvas ref=${canvas} class="lanes" role="img" aria-label=${label} style=${{ height: `${height}px` }}
    onPointerDown=${(event) => { dragged.current = point(event); }}
    onPointerUp=${(event) => {
      const [x, y, width] = point(event);
      const from = dragged.current?.[0] ?? x;
      dragged.current = null;
      if (Math.abs(x - from) > 5) onRange([timeAt(Math.min(x, from), width), timeAt(Math.max(x, from), width)]);
      else onSelect(find(x, y, xOf(width)));
    }}
    onDblClick=${() => onRange(null)}></canvas>`;
}

function Steps({ steps, range, selected, onSelect, onRange }) {
  const draw = (context, width, x) => {
    const most = Math.max(1, ...steps.map((step) => step.num_decode_rows));
    const names = { prefill: T.prefill, decode: T.decode, speculation: T.speculation };
    LANES.forEach((lane, place) => {
      const bottom = (place + 1) * LANE_HEIGHT;
      context.fillStyle = colour("--soft");
      context.fillText(names[lane], 0, bottom - LANE_HEIGHT / 2);
      context.fillStyle = colour("--line");
      context.fillRect(LABEL_WIDTH, bottom - 1, width - LABEL_WIDTH, 1);
    });
    const [decode, accepted, rejected, mark] = ["--decode", "--good", "--bad", "--ink"].map(colour);
    for (const step of steps) {
      const left = Math.max(LABEL_WIDTH, x(step.committed_at_s - step.seconds));
      const wide = Math.max(0.7, x(step.committed_at_s) - left - 0.3);
      let from = left;
      const charged = step.prefills.reduce((sum, [, , seconds]) => sum + seconds, 0) || 1;
      for (const [request, , seconds] of step.prefills) {
        const part = (wide * seconds) / charged;
        context.fillStyle = requestColour(request);
        context.fillRect(from, 6, Math.max(part, 0.7), LANE_HEIGHT - 8);
        from += part;
      }
      if (step.num_decode_rows) {
        const high = ((LANE_HEIGHT - 8) * step.num_decode_rows) / most;
        context.fillStyle = decode;
        context.fillRect(left, 2 * LANE_HEIGHT - 1 - high, wide, high);
      }
      if (step.num_drafts) {
        const high = LANE_HEIGHT - 8;
        const good = (high * step.num_accepted) / step.num_drafts;
        context.fillStyle = accepted;
        context.fillRect(left, 3 * LANE_HEIGHT - 1 - good, wide, good);
        context.fillStyle = rejected;
        context.fillRect(left, 3 * LANE_HEIGHT - 1 - high, wide, high - good);
      }
      if (selected?.step === step) {
        context.strokeStyle = mark;
        context.strokeRect(left - 1, 1, wide + 2, LANES.length * LANE_HEIGHT - 2);
      }
    }
  };
  const find = (pixel, _, x) => {
    let [best, distance] = [null, 6];
    for (const step of steps) {
      const [left, right] = [x(step.committed_at_s - step.seconds), x(step.committed_at_s)];
      const away = Math.max(left - pixel, pixel - right, 0);
      if (away < distance) [best, distance] = [step, away];
    }
    return best && { step: best };
  };
  return html`<h2>${T.steps}</h2><${TimeCanvas} label=${T.stepsLabel} height=${LANES.length * LANE_HEIGHT}
    range=${range} draw=${draw} find=${find} onSelect=${onSelect} onRange=${onRange} />`;
}

/** The sequences in a range, oldest first. */
function sequencesWithin(records, [from, to]) {
  return [...records.sequences.values()]
    .filter(({ timings }) => timings.finished_s >= from && timings.arrival_s <= to)
    .sort((a, b) => a.timings.arrival_s - b.timings.arrival_s);
}

/** Those that are drawn: of many, the newest; with `byTenant`, a lane of rows for each tenant. */
function rowsOf(sequences, byTenant) {
  const newest = sequences.slice(-MAX_ROWS);
  const order = (sequence) => sequence.tenant ?? "";
  return byTenant ? newest.sort((a, b) => order(a).localeCompare(order(b))) : newest;
}

/** (activity, from, to) of a sequence. */
function spansOf({ timings }) {
  const { activities } = timings;
  return activities.map(([activity, since], place) => [
    activity, since, activities[place + 1]?.[1] ?? timings.finished_s,
  ]);
}

function Requests({ rows, byTenant, range, selected, onSelect, onRange }) {
  const draw = (context, width, x) => {
    const colours = Object.fromEntries(Object.keys(T.activities).map((name) => [name, colour(`--${name}`)]));
    rows.forEach((sequence, place) => {
      const top = place * ROW_HEIGHT;
      context.fillStyle = requestColour(sequence.request_id);
      context.fillRect(0, top + 3, 10, ROW_HEIGHT - 6);
      context.fillStyle = colour("--soft");
      const tenant = sequence.tenant ?? "";
      const begins = byTenant && (place === 0 || tenant !== (rows[place - 1].tenant ?? ""));
      if (begins) context.fillRect(0, top, width, 1);
      const label = byTenant ? (begins ? tenant || T.noTenant : "") : sequence.request_id.slice(-9);
      context.fillText(label, 14, top + ROW_HEIGHT / 2, LABEL_WIDTH - 16);
      for (const [activity, since, until] of spansOf(sequence)) {
        const left = Math.max(LABEL_WIDTH, x(since));
        const right = Math.min(width, x(until));
        if (right < left) continue;
        context.fillStyle = colours[activity];
        context.fillRect(left, top + 3, Math.max(right - left, 0.7), ROW_HEIGHT - 5);
      }
      const first = sequence.timings.first_token_s;
      if (first !== null && x(first) >= LABEL_WIDTH) {
        context.fillStyle = colour("--ink");
        context.fillRect(x(first), top + 1, 1, ROW_HEIGHT - 2);
      }
      if (selected?.sequence?.request_id === sequence.request_id) {
        context.strokeStyle = colour("--accent");
        context.strokeRect(0.5, top + 1.5, width - 1, ROW_HEIGHT - 2);
      }
    });
  };
  const find = (_, pixel) => {
    const sequence = rows[Math.floor(pixel / ROW_HEIGHT)];
    return sequence ? { sequence } : null;
  };
  return html`
    <h2>${T.requests} <${Legend} /></h2>
    <${TimeCanvas} label=${T.requestsLabel} height=${Math.max(1, rows.length) * ROW_HEIGHT + 2}
      range=${range} draw=${draw} find=${find} onSelect=${onSelect} onRange=${onRange} />`;
}

const Legend = () => html`<span class="legend">${Object.entries(T.activities).map(([id, name]) =>
  html`<span key=${id}><i class="swatch ${id}"></i>${name}</span>`)}</span>`;

/** The requests as a list, for the keyboard and for screen readers. */
function RequestList({ records, origin, onSelect }) {
  const newest = [...records.sequences.values()].slice(-30).reverse();
  if (!newest.length) return null;
  return html`
    <details><summary>${T.chooseRequest}</summary>
      <ul class="list">
        ${newest.map((sequence) => html`
          <li key="${sequence.request_id} ${sequence.index}"><button type="button" onClick=${() => onSelect({ sequence })}>
            ${sequence.request_id} · ${(sequence.timings.arrival_s - origin).toFixed(3)} s ·
            ${T.outputTokens(sequence.timings.num_output_tokens)}</button></li>`)}
      </ul>
    </details>`;
}

function Details({ selected, records, isLive, onClose }) {
  const [sentence, setSentence] = useState("");
  const id = selected?.sequence?.request_id;
  useEffect(() => {
    let isCurrent = true;
    setSentence(records.explanations.get(id) ?? "");
    if (id && isLive) {
      getJson(`debug/requests/${encodeURIComponent(id)}`)
        .then((explained) => explained.sequences.map((item) => item.sentence).join(" "), (error) => error.message)
        .then((text) => isCurrent && setSentence(text));
    }
    return () => { isCurrent = false; };
  }, [id, isLive]);
  if (!selected) return null;
  const { step, sequence } = selected;
  const total = sequence ? sequence.timings.finished_s - sequence.timings.arrival_s || 1 : 1;
  const rows = step
    ? Object.entries(step).filter(([name]) => !["kind", "prefills"].includes(name))
    : spansOf(sequence).map(([activity, since, until]) => [T.activities[activity], `${((until - since) * 1e3).toFixed(1)} ms`]);
  return html`
    <section class="details" aria-live="polite">
      <header><h2>${step ? T.step(step.step_id) : `${T.requestId} ${id}`}</h2>
        <button type="button" class="small" onClick=${onClose}>${T.close}</button></header>
      ${sentence && html`<p>${sentence}</p>`}
      ${sequence && html`<div class="waterfall">${spansOf(sequence).map(([activity, since, until]) => html`
        <i class="swatch ${activity}" style=${{ flexGrow: Math.max((until - since) / total, 1e-6) * 1e3 }}
          title="${T.activities[activity]} ${((until - since) * 1e3).toFixed(1)} ms"></i>`)}</div>`}
      <dl class="figures">
        ${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${
          typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : String(value)}</dd></div>`)}
      </dl>
      ${step?.prefills.length > 0 && html`<ul class="list">${step.prefills.map(([request, tokens, seconds]) =>
        html`<li>${request}: ${T.outputTokens(tokens)}, ${(seconds * 1e3).toFixed(2)} ms</li>`)}</ul>`}
    </section>`;
}
