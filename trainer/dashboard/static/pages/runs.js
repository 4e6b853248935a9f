// All runs, the newest first; those that are ticked can be compared.
import { html, useRef, useState } from "../vendor/preact-htm.js";
import { get, useData } from "../lib/api.js";
import { ago, clock, num } from "../lib/format.js";
import { href, runPath, setQuery } from "../lib/route.js";
import { Failure, Link, Loaded, Status, statusOf } from "../lib/ui.js";
import { MOST_RUNS } from "./compare.js";
import { Tags } from "./noted.js";

export function Runs({ query }) {
  const state = useData(query.deleted ? "runs?deleted=1" : "runs", { every: 5000 });
  document.title = "runs · agl";
  return html`<${Loaded} state=${state}>${(data) => html`<${List} data=${data} query=${query} />`}<//>`;
}

function List({ data, query }) {
  const [older, setOlder] = useState({ runs: [], next: null, error: null });
  const next = older.next ?? data.older;
  const all = [...data.runs, ...older.runs];
  const runs = all.filter((run) => matches(run, query.text || "")).sort(ORDERS[query.order] || (() => 0));
  const ticked = (query.ticked || "").split(",").filter(Boolean);
  const many = data.stores.length > 1;

  async function more() {
    try {
      const pages = await Promise.all(
        Object.entries(next).map(([store, after]) => get(`runs?store=${store}&after=${encodeURIComponent(after)}${query.deleted ? "&deleted=1" : ""}`)),
      );
      setOlder({
        runs: [...older.runs, ...pages.flatMap((p) => p.runs)],
        next: Object.assign({}, ...pages.map((p) => p.older)),
        error: null,
      });
    } catch (error) {
      setOlder({ ...older, error });
    }
  }
  function tick(name) {
    const others = ticked.filter((t) => t !== name);
    setQuery({ ticked: (others.length < ticked.length ? others : [...others, name].slice(-MOST_RUNS)).join(",") });
  }
  return html`
    <div class="head">
      <h1>Runs</h1>
      ${ticked.length > 1
        ? html`<a class="button" href=${href(["compare"], { a: ticked[0], b: ticked[1], more: ticked.slice(2).join(",") })}>Compare</a>`
        : html`<span class="dim">${runs.length > 1 ? "tick two or more runs to compare them" : ""}</span>`}
    </div>
    ${all.length > 1 &&
    html`<form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <label>search <input type="search" value=${query.text || ""} placeholder="name, tag, note, algorithm, status, setting" onInput=${(event) => setQuery({ text: event.target.value })} /></label>
      <label>order
        <select value=${query.order || ""} onChange=${(event) => setQuery({ order: event.target.value })}>
          <option value="">newest first</option>
          ${Object.keys(ORDERS).map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
      ${runs.length < all.length && html`<span class="dim">${num(runs.length)} of ${num(all.length)}</span>`}
    </form>`}
    ${data.stores
      .filter((s) => s.error)
      .map((s) => html`<div class="failure"><p><strong>${s.name}</strong>: ${s.error.message}</p><p>→ ${s.error.hint}</p></div>`)}
    ${runs.length === 0 && all.length > 0 && html`<p class="empty">No run matches.</p>`}
    ${all.length === 0
      ? html`<p class="empty">${query.deleted ? "No run is deleted." : html`No run in ${data.stores.map((s) => s.name).join(", ")} yet. A run appears here as soon as it starts.`}</p>`
      : runs.length > 0 && html`<div class="scroll"><table class="runs stack">
          <thead><tr>
            <th><span class="unseen">compare</span></th><th>run</th><th>status</th><th class="right">steps</th>
            <th>held-out reward</th><th>training reward</th><th>curves</th><th>last write</th>
          </tr></thead>
          <tbody>${runs.map((run) => html`<${Row} key=${`${run.store}:${run.run_id}`} run=${run} many=${many} stores=${data.stores} ticked=${ticked} tick=${tick} />`)}</tbody>
        </table></div>`}
    ${older.error && html`<${Failure} error=${older.error} />`}
    ${Object.keys(next).length > 0 && html`<p><button type="button" onClick=${more}>Older runs</button></p>`}
    <p class="small"><a href=${href([], query.deleted ? {} : { deleted: 1 })}>${query.deleted ? "All runs" : "Deleted runs"}</a></p>
    <ul class="plain stores">
      ${data.stores
        .filter((s) => !s.error)
        .map(
          (s) => html`<li>
            <span class="dim">${s.name}</span>
            <${Link} to=${[s.store, "runners"]}>runners<//>
            <${Link} to=${[s.store, "recorded"]}>recorded programs<//>
          </li>`,
        )}
    </ul>
  `;
}

const lastOf = (run, name) => run.ends[name]?.at(-1)?.[1] ?? -Infinity;
const ORDERS = {
  "held-out reward": (a, b) => lastOf(b, "val/reward") - lastOf(a, "val/reward"),
  "training reward": (a, b) => lastOf(b, "train/reward") - lastOf(a, "train/reward"),
  "last write": (a, b) => b.updated_at - a.updated_at,
  steps: (a, b) => b.step - a.step,
};

// Every word is in the run's names, or in a setting as NAME=VALUE.
function matches(run, text) {
  const settings = Object.entries(run.config).map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`);
  const noted = [...run.about.tags, run.about.note];
  const all = [run.name, run.run_id, run.algorithm, run.status, run.directory, ...noted, ...settings].join(" ").toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => all.includes(word));
}

function Row({ run, many, stores, ticked, tick }) {
  const name = `${run.store}:${run.run_id}`;
  return html`<tr>
    <td><input type="checkbox" aria-label=${`compare ${run.run_id}`} checked=${ticked.includes(name)} onChange=${() => tick(name)} /></td>
    <td>
      <${Link} class="strong" to=${runPath(run.store, run.run_id)}>${run.name || run.run_id}<//>
      <${Tags} tags=${run.about.tags} />
      <div class="dim small">${[run.algorithm, run.name ? run.run_id : "", many ? stores.find((s) => s.store === run.store)?.name : ""].filter(Boolean).join(" · ")}</div>
    </td>
    <td><${Status} of=${statusOf(run)} />${run.error && html`<div class="small bad clip" title=${run.error}>${run.error}</div>`}</td>
    <td class="right num">${num(run.step)}${run.steps ? html`<span class="dim"> / ${num(run.steps)}</span>` : ""}</td>
    <td data-label="held-out"><${Change} ends=${run.ends["val/reward"]} strong=${true} /></td>
    <td data-label="training"><${Change} ends=${run.ends["train/reward"]} /></td>
    <td data-label="curves"><${Spark} run=${run} /></td>
    <td class="dim" title=${clock(run.updated_at)}>${ago(run.updated_at)}</td>
  </tr>`;
}

const WIDTH = 90;
const HEIGHT = 22;

// The course of training and of held-out reward, as two lines on one scale. Their ends stand beside it as text.
function Spark({ run }) {
  const kept = useRef(null);
  // Of a run that goes on, the numbers are read again after each step; until they are there the earlier ones stay.
  const path = `${run.store}/runs/${encodeURIComponent(run.run_id)}/metrics?name=train/reward&name=val/reward&until=${run.step}`;
  kept.current = useData(path).data ?? kept.current;
  const { steps = [], values = {} } = kept.current || {};
  const lines = ["train/reward", "val/reward"].map((name) => means(steps, values[name] || []));
  const all = lines.flat();
  if (all.length < 3) return null;
  const [left, right] = [Math.min(...steps), Math.max(...steps)];
  const [low, high] = [Math.min(...all.map(([, y]) => y)), Math.max(...all.map(([, y]) => y))];
  const at = ([x, y]) => `${(1 + ((WIDTH - 2) * (x - left)) / (right - left || 1)).toFixed(1)},${(HEIGHT - 1 - ((HEIGHT - 2) * (y - low)) / (high - low || 1)).toFixed(1)}`;
  return html`<svg class="spark" width=${WIDTH} height=${HEIGHT} aria-hidden="true">
    ${lines.map((line, i) => html`<polyline class=${["train", "held-out"][i]} points=${line.map(at).join(" ")} />`)}
  </svg>`;
}

// [step, value] of what is known, as means of at most so many stretches.
function means(steps, values, most = 40) {
  const known = steps.map((step, i) => [step, values[i] ?? null]).filter(([, value]) => value !== null);
  const size = Math.ceil(known.length / most) || 1;
  const mean = (part, i) => part.reduce((sum, point) => sum + point[i], 0) / part.length;
  return known.flatMap((_, i) => (i % size ? [] : [known.slice(i, i + size)])).map((part) => [mean(part, 0), mean(part, 1)]);
}

function Change({ ends, strong }) {
  if (!ends || ends.length === 0) return html`<span class="dim">–</span>`;
  const first = ends[0][1];
  const last = ends[ends.length - 1][1];
  if (ends.length === 1) return html`<span class="num">${num(first)}</span>`;
  return html`<span class="num"><span class="dim">${num(first)} →</span> ${strong ? html`<b>${num(last)}</b>` : num(last)}</span>`;
}
