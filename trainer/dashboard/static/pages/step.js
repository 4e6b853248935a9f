// One step's rollouts: each group as a strip of reward dots, a histogram whose bins select, filters.
import { html, useMemo, useState } from "../vendor/preact-htm.js";
import { get, useData } from "../lib/api.js";
import { num, oneLine, signed } from "../lib/format.js";
import { runPath, setQuery, stepPath, storedStep } from "../lib/route.js";
import { Crumbs, Fact, Failure, Link, Loaded, Scale, TaskText, advantageClass } from "../lib/ui.js";

const BINS = 20;
const SHOWN_GROUPS = 90;

export function Step({ store, id, mode, step, query }) {
  const path = `${store}/runs/${encodeURIComponent(id)}/steps/${encodeURIComponent(mode)}/${storedStep(mode, step)}`;
  const state = useData(storedStep(mode, step) < 0 ? null : path);
  const here = mode === "train" ? `step ${step}` : `${mode === "val" ? "validation" : mode} at step ${step}`;
  return html`
    <${Crumbs} items=${[[id, runPath(store, id)]]} here=${here} />
    <${Loaded} state=${state}>${(data) => html`<${View} first=${data} ...${{ store, id, mode, step, query, path, here }} />`}<//>
  `;
}

function View({ first, store, id, mode, step, query, path, here }) {
  const [rest, setRest] = useState({ rollouts: [], next: first.next, error: null });
  const rollouts = useMemo(() => [...first.rollouts, ...rest.rollouts], [first, rest]);
  async function more() {
    try {
      const page = await get(`${path}?limit=512&after=${encodeURIComponent(rest.next)}`);
      setRest({ rollouts: [...rest.rollouts, ...page.rollouts], next: page.next, error: null });
    } catch (error) {
      setRest({ ...rest, error });
    }
  }
  const agents = [...new Set(rollouts.flatMap((r) => r.agents))].sort();
  const rewards = rollouts.map((r) => r.reward).filter((r) => r !== null);
  const range = useMemo(() => axis(rewards), [rollouts]);
  const kept = rollouts.filter((r) => matches(r, query));
  const groups = [...Map.groupBy(kept, (r) => r.group)];
  const failed = rollouts.filter((r) => r.status === "failed").length;
  const dropped = [...Map.groupBy(rollouts, (r) => r.group)].filter(([, g]) => g.every(taughtNothing)).length;
  const [before, after] = mode === "train" ? first.around : [null, null];
  // A search for prompts trains nothing.
  const trains = mode === "train" && rollouts.some((r) => r.trained_tokens > 0 || r.dropped !== null);
  const sum = (name) => rollouts.reduce((total, r) => total + r[name], 0);
  if (rollouts.length === 0) return html`<h1>${here}</h1><p class="empty">The store has no rollouts of this step.</p>`;
  return html`
    <div class="head">
      <h1>${here}</h1>
      <nav class="around" aria-label="neighbouring steps">
        ${before !== null && html`<${Link} to=${stepPath(store, id, mode, before)}>← step ${before + 1}<//>`}
        ${after !== null && html`<${Link} to=${stepPath(store, id, mode, after)}>step ${after + 1} →<//>`}
      </nav>
    </div>
    <dl class="facts">
      <${Fact} label="rollouts">${num(first.total)}${rollouts.length < first.total ? html`<span class="dim"> (${num(rollouts.length)} loaded)</span>` : ""}<//>
      <${Fact} label="mean reward">${rewards.length ? num(rewards.reduce((a, b) => a + b, 0) / rewards.length) : "–"}<//>
      ${trains &&
      html`<${Fact} label="groups not trained" title="all rewards equal, or nothing to train">${num(dropped)}<//>
        <${Fact} label="trained tokens" title="those whose advantage is 0 teach nothing">${num(sum("trained_tokens"))}${sum("zero_advantage_tokens") > 0 && html`<span class="dim"> (${num(sum("zero_advantage_tokens"))} with advantage 0)</span>`}<//>`}
      <${Fact} label="failed">${num(failed)}<//>
      <${Fact} label="forks" title="conversations that could not be continued token for token">${num(sum("forks"))}<//>
    </dl>
    <section class="card">
      <${Histogram} rewards=${rewards} range=${range} query=${query} />
      <${Filters} query=${query} agents=${agents} kept=${kept.length} all=${rollouts.length} />
    </section>
    <section>
      ${groups.every(([, members]) => members.length === 1)
        ? html`<div class="singles">${kept.slice(0, Number(query.groups) || SHOWN_GROUPS).map((r) => html`<${Single} key=${r.rollout_id} ...${{ store, r, range }} />`)}</div>`
        : html`<p class="small dim legend-row"><span>one dot per rollout, placed by reward, coloured by advantage</span> <${Scale} /></p>
        <div class="strips" role="list">
        ${groups.slice(0, Number(query.groups) || SHOWN_GROUPS).map(([name, members]) => html`<${Strip} key=${name} ...${{ store, members, range, mode }} />`)}
      </div>`}
      ${groups.length > (Number(query.groups) || SHOWN_GROUPS) &&
      html`<p><button type="button" onClick=${() => setQuery({ groups: (Number(query.groups) || SHOWN_GROUPS) + 200 })}>
        ${num(groups.length - (Number(query.groups) || SHOWN_GROUPS))} more groups
      </button></p>`}
      ${rest.error && html`<${Failure} error=${rest.error} />`}
      ${rest.next && html`<p><button type="button" onClick=${more}>Load more of the ${num(first.total)} rollouts</button></p>`}
    </section>
  `;
}

function matches(r, { agent, low, high, failed, forked, text }) {
  if (agent && !r.agents.includes(agent)) return false;
  if (low !== undefined && !(r.reward !== null && r.reward >= Number(low) - 1e-9)) return false;
  if (high !== undefined && !(r.reward !== null && r.reward <= Number(high) + 1e-9)) return false;
  if (failed && r.status !== "failed" && r.failed_calls === 0) return false;
  if (forked && r.forks === 0) return false;
  return !text || JSON.stringify(r.task).toLowerCase().includes(text.toLowerCase());
}

function axis(rewards) {
  if (rewards.length === 0) return [0, 1];
  const low = Math.min(...rewards);
  const high = Math.max(...rewards);
  // Most rewards are between 0 and 1; then all steps have the same axis.
  if (low >= 0 && high <= 1) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

const place = (value, [low, high]) => (value - low) / (high - low);

function Histogram({ rewards, range, query }) {
  const counts = new Array(BINS).fill(0);
  for (const r of rewards) counts[Math.min(BINS - 1, Math.floor(place(r, range) * BINS))] += 1;
  const most = Math.max(1, ...counts);
  const width = (range[1] - range[0]) / BINS;
  const edge = (i) => Number((range[0] + i * width).toFixed(6));
  const chosen = (i) => query.low !== undefined && Number(query.low) === edge(i) && Number(query.high) === edge(i + 1);
  const pick = (i) => setQuery(chosen(i) ? { low: "", high: "" } : { low: edge(i), high: edge(i + 1) });
  return html`<figure class="histogram">
    <figcaption>rewards <span class="dim">click a bar to filter</span></figcaption>
    <div class="bars">
      ${counts.map(
        (count, i) => html`<button
          type="button"
          class="bar ${chosen(i) ? "chosen" : ""}"
          disabled=${count === 0}
          aria-pressed=${chosen(i) ? "true" : "false"}
          aria-label=${`${count} rollouts with reward ${num(edge(i))} to ${num(edge(i + 1))}`}
          title=${`${num(edge(i))} to ${num(edge(i + 1))}: ${count}`}
          onClick=${() => pick(i)}
        ><span class="count">${count || ""}</span><i class="fill f${Math.ceil((count / most) * 20)}"></i></button>`,
      )}
    </div>
    <div class="ends"><span>${num(range[0])}</span><span>${num(range[1])}</span></div>
  </figure>`;
}

function Filters({ query, agents, kept, all }) {
  const any = ["agent", "low", "high", "failed", "forked", "text"].some((name) => query[name]);
  const set = (name) => (event) => setQuery({ [name]: event.target.type === "checkbox" ? (event.target.checked ? "1" : "") : event.target.value });
  return html`<form class="filters" onSubmit=${(event) => event.preventDefault()}>
    <label>task <input type="search" value=${query.text || ""} onInput=${set("text")} placeholder="contains" /></label>
    <label>agent
      <select value=${query.agent || ""} onChange=${set("agent")}>
        <option value="">all</option>
        ${agents.map((agent) => html`<option value=${agent}>${agent}</option>`)}
      </select>
    </label>
    <label>reward from <input type="number" step="any" value=${query.low ?? ""} onInput=${set("low")} /></label>
    <label>to <input type="number" step="any" value=${query.high ?? ""} onInput=${set("high")} /></label>
    <label class="tick"><input type="checkbox" checked=${Boolean(query.failed)} onChange=${set("failed")} /> failed</label>
    <label class="tick"><input type="checkbox" checked=${Boolean(query.forked)} onChange=${set("forked")} /> forked</label>
    <span class="dim" role="status">${any ? `${num(kept)} of ${num(all)} rollouts` : ""}</span>
    ${any && html`<button type="button" onClick=${() => setQuery({ agent: "", low: "", high: "", failed: "", forked: "", text: "" })}>Clear</button>`}
  </form>`;
}

const ROWS = 3;
const CELLS = 24;

// Nothing was trained, or all of it with advantage 0.
const taughtNothing = (r) => r.trained_tokens === r.zero_advantage_tokens;

// Dots at their reward; equal ones are stacked, three high, then towards the middle.
function Strip({ store, members, range, mode }) {
  const bins = Map.groupBy(members, (r) => (r.reward === null ? -1 : Math.round(place(r.reward, range) * (CELLS - 1))));
  const rewards = members.map((r) => r.reward).filter((r) => r !== null);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  const same = rewards.length > 1 && Math.max(...rewards) === Math.min(...rewards);
  const dropped = members.find((r) => r.dropped)?.dropped;
  const trained = !members.every(taughtNothing);
  return html`<div class="strip" role="listitem">
    <div class="about">
      <${Link} class="clip" to=${[store, members.length > 1 ? "group" : "rollout", members[0].rollout_id]} title=${oneLine(members[0].task)}><${TaskText} task=${members[0].task} /><//>
      <div class="dim small">
        ${members.length > 1 ? `${members.length} rollouts · ` : ""}mean ${num(mean)}
        ${mode === "train" && !trained && html` · <span class="warn">${dropped || (same ? "equal rewards, not trained" : "not trained")}</span>`}
      </div>
    </div>
    <div class="dots">
      ${[...bins].flatMap(([bin, several]) =>
        several.map((r, i) => html`<${Dot} ...${{ store, r, range, bin, column: Math.floor(i / ROWS), row: i % ROWS }} />`),
      )}
    </div>
  </div>`;
}

function about(r) {
  return [
    r.reward === null ? (r.status === "failed" ? `failed: ${r.error || ""}` : r.status) : `reward ${num(r.reward)}`,
    r.advantage !== null ? `advantage ${signed(r.advantage)}` : r.dropped || "",
    r.forks ? `${r.forks} forked` : "",
  ].filter(Boolean).join(", ");
}

// The advantage decides the colour; what was not trained is filled by its reward.
function kindOf(r, range) {
  if (r.reward === null) return "none";
  const kind = r.advantage === null ? `r${Math.round(place(r.reward, range) * 4)}` : advantageClass(r.advantage);
  return r.forks ? `${kind} forked` : kind;
}

function Dot({ store, r, range, bin, column, row }) {
  const inward = bin < CELLS / 2 ? 1 : -1;
  const left = bin < 0 ? "0" : `calc(${((bin / (CELLS - 1)) * 100).toFixed(2)}% + ${inward * column * 12}px)`;
  return html`<${Link}
    class=${`dot ${kindOf(r, range)}`}
    to=${[store, "rollout", r.rollout_id]}
    aria-label=${about(r)}
    title=${about(r)}
    style=${{ left, bottom: `${row * 12}px` }}
  />`;
}

// A rollout that has no others of its task next to it, as in a validation.
function Single({ store, r, range }) {
  return html`<${Link} class="single" to=${[store, "rollout", r.rollout_id]} title=${about(r)}>
    <i class=${`dot ${kindOf(r, range)}`}></i><span class="clip"><${TaskText} task=${r.task} /></span>
    <span class="num dim">${r.reward === null ? r.status : num(r.reward)}</span>
  <//>`;
}
