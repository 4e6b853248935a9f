// Up to six runs: their curves and what differs in their settings; two of them, or two validations of one, on the same
// held-out tasks.
import { html } from "../vendor/preact-htm.js";
import { get, useData } from "../lib/api.js";
import { byName, num, signed } from "../lib/format.js";
import { Plot } from "../lib/plot.js";
import { runPath, setQuery } from "../lib/route.js";
import { Crumbs, Fact, Failure, Link, Loaded, TaskText } from "../lib/ui.js";

const COLORS = ["--val", "--second", "--third", "--fourth", "--fifth", "--sixth"];
export const MOST_RUNS = COLORS.length;

export function Compare({ query }) {
  const names = [query.a, query.b, ...(query.more || "").split(",").filter(Boolean)].slice(0, MOST_RUNS);
  const valid = names.every((name) => /^\d+:./.test(name || ""));
  const split = (name) => [name.slice(0, name.indexOf(":")), name.slice(name.indexOf(":") + 1)];
  const sides = valid ? names.map(split) : [];
  const curves = useData(valid ? names.join(" ") : null, {
    read: (_, signal) => Promise.all(sides.map(([store, run]) => get(`${store}/runs/${encodeURIComponent(run)}/metrics`, signal))),
  });
  const runs = useData(valid ? `runs ${names.join(" ")}` : null, {
    read: (_, signal) => Promise.all(sides.map(([store, run]) => get(`${store}/runs/${encodeURIComponent(run)}`, signal))),
  });
  const wanted = new URLSearchParams(Object.entries(query).filter(([name]) => ["a", "b", "a_step", "b_step"].includes(name)));
  const paired = useData(valid ? `compare?${wanted}` : null);
  if (!valid) return html`<${Crumbs} items=${[]} here="compare" /><p class="empty">Tick two runs in the list first.</p>`;
  return html`
    <${Crumbs} items=${[]} here="compare" />
    <div class="head"><h1>${["Two", "Three", "Four", "Five", "Six"][sides.length - 2]} runs compared</h1></div>
    <p class="versus">
      ${sides.map(([store, run], i) => html`<i class="swatch c${COLORS[i].slice(2)}"></i><span class="dim">${LETTERS[i]}</span> <${Link} to=${runPath(store, run)}>${runs.data?.[i].name || run}<//>`)}
    </p>
    <${Loaded} state=${curves}>${(data) => html`<${Curves} data=${data} />`}<//>
    <${Loaded} state=${runs}>${(data) => html`<${Settings} runs=${data} />`}<//>
    ${paired.error ? html`<${Failure} error=${paired.error} />` : html`<${Loaded} state=${paired}>${(data) => html`<${Paired} data=${data} sides=${sides} />`}<//>`}
  `;
}

const LETTERS = "abcdef";

// The settings in which they differ.
function Settings({ runs }) {
  const flat = runs.map((run) => ({ algorithm: run.algorithm, ...run.config }));
  const names = [...new Set(flat.flatMap(Object.keys))].sort();
  const text = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  const different = names.filter((name) => new Set(flat.map((settings) => text(settings[name]))).size > 1);
  if (different.length === 0) return html`<p class="note">They have the same settings.</p>`;
  return html`<section class="scroll"><h2>settings that differ</h2><table class="stack settings">
    <thead><tr><th>setting</th>${runs.map((_, i) => html`<th>${LETTERS[i]}</th>`)}</tr></thead>
    <tbody>${different.map((name) => html`<tr><th scope="row">${name}</th>${flat.map((settings, i) => html`<td data-label=${LETTERS[i]}>${text(settings[name])}</td>`)}</tr>`)}</tbody>
  </table></section>`;
}

// All on the same steps.
function overlaid(data, name) {
  const steps = [...new Set(data.flatMap((d) => d.steps))].sort((a, b) => a - b);
  const series = data.map((d, i) => {
    const at = new Map(d.steps.map((s, k) => [s, d.values[name]?.[k] ?? null]));
    return { label: LETTERS[i], color: COLORS[i], values: steps.map((s) => at.get(s) ?? null), points: name.startsWith("val/") };
  });
  return { steps, series };
}

function Curves({ data }) {
  const names = [...new Set(data.flatMap((d) => Object.keys(d.values)))].filter((name) => data.filter((d) => d.values[name]).length > 1);
  const first = ["val/reward", "train/reward"].filter((name) => names.includes(name));
  const others = names.filter((name) => !first.includes(name)).sort(byName);
  return html`
    <div class="halves">
      ${first.map((name) => html`<section class="card"><${Plot} label=${name === "val/reward" ? "held-out reward" : "training reward"} height=${200} unit ...${overlaid(data, name)} /></section>`)}
    </div>
    ${others.length > 0 &&
    html`<details><summary><h2>${num(others.length)} more curves</h2></summary><div class="plots">
      ${others.map((name) => html`<${Plot} small key=${name} label=${name} height=${120} ...${overlaid(data, name)} />`)}
    </div></details>`}
  `;
}

function Paired({ data, sides }) {
  const { paired, changed } = data;
  const sure = paired.interval && (paired.interval[0] > 0 || paired.interval[1] < 0);
  return html`
    <section class="card">
      <h2>a and b on the same held-out tasks</h2>
      <dl class="facts">
        ${data.sides.map(
          (side, i) => html`<${Fact} label=${`${"ab"[i]}: mean reward`}>${`${num(side.reward)} `}
            <label class="small dim">at step <select value=${side.step} onChange=${(e) => setQuery({ [`${"ab"[i]}_step`]: e.target.value })}>
              ${side.steps.map((s) => html`<option value=${s}>${num(s)}</option>`)}
            </select></label><//>`,
        )}
        <${Fact} label="difference, b − a">${signed(paired.difference)} ${paired.interval && html`<span class="dim small">95 %: ${signed(paired.interval[0])} to ${signed(paired.interval[1])}</span>`}<//>
        <${Fact} label="p" title="exact sign-flip test over the tasks">${num(paired.p)}<//>
        <${Fact} label="common tasks">${num(paired.tasks)}<//>
        <${Fact} label="better, worse">${num(data.better)}, ${num(data.worse)}<//>
      </dl>
      <p class="note">${verdict(paired, sure)}</p>
    </section>
    ${changed.length > 0 &&
    html`<section class="scroll"><h2>tasks whose reward changed</h2><table class="stack">
      <thead><tr><th>task</th><th class="right">a</th><th class="right">b</th><th class="right">change</th></tr></thead>
      <tbody>
        ${changed.map(
          (task) => html`<tr>
            <td class="wide"><${TaskText} task=${task.task} /></td>
            ${task.rewards.map(
              (reward, i) => html`<td class="right num" data-label=${"ab"[i]}>
                ${task.rollouts[i].map((id, k) => html`<${Link} to=${[sides[i][0], "rollout", id]} title=${id}>${k === 0 ? num(reward) : `·${k + 1}`}<//> `)}
              </td>`,
            )}
            <td class="right num" data-label="change"><span class="chip ${task.rewards[1] > task.rewards[0] ? "p4" : "n4"}">${signed(task.rewards[1] - task.rewards[0])}</span></td>
          </tr>`,
        )}
      </tbody>
    </table></section>`}
  `;
}

function verdict({ tasks, difference }, sure) {
  if (tasks === 0) return "The two have no held-out task in common.";
  if (!sure) return "The interval contains 0: the difference on these tasks is not significant.";
  return `${difference > 0 ? "b" : "a"} is better on these tasks.`;
}
