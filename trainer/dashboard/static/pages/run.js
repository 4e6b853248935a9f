// One run: reward over its steps, every other metric, its settings. Follows a running job.
import { html, useMemo, useRef, useState } from "../vendor/preact-htm.js";
import { get, useData } from "../lib/api.js";
import { ago, byName, clock, dollars, duration, num, oneLine, signed } from "../lib/format.js";
import { Plot } from "../lib/plot.js";
import { href, stepPath } from "../lib/route.js";
import { Memory } from "./memory.js";
import { Noted } from "./noted.js";
import { Prompts } from "./prompts.js";
import { Crumbs, Fact, Loaded, Status, Switch, Value, statusOf } from "../lib/ui.js";

const POLL = 2000;
const ROLLOUT = "train/rollout_seconds/";

export function Run({ store, id }) {
  const path = `${store}/runs/${encodeURIComponent(id)}`;
  const going = useRef(true);
  const [live, setLive] = useState(true);
  const kept = useRef({ steps: [], values: {} });

  // The run, and what is new of its numbers. The last known step is read again: it may have been half written.
  async function read(_, signal, show) {
    const run = await get(path, signal);
    if (run.step < (kept.current.steps.at(-1) ?? 0)) kept.current = { steps: [], values: {} };
    let more = true;
    if (kept.current.steps.length === 0) {
      // The curves first: of a long run the other numbers take a while.
      const rewards = await get(`${path}/metrics?name=train/reward&name=val/reward`, signal);
      if (rewards.steps.length > 0) show({ run, metrics: rewards });
    }
    while (more) {
      const after = kept.current.steps.length > 1 ? kept.current.steps.at(-2) : -1;
      const page = await get(`${path}/metrics?after=${after}`, signal);
      kept.current = merge(kept.current, page);
      more = page.more;
    }
    going.current = run.status === "running";
    if (!going.current) setLive(false);
    return { run, metrics: kept.current };
  }
  const state = useData(path, { every: live ? POLL : 0, read });
  return html`
    <${Crumbs} items=${[]} here=${state.data?.run.name || id} />
    <${Loaded} state=${state}>${(data) => html`<${View} store=${store} ...${data} />`}<//>
  `;
}

function merge(old, page) {
  if (page.steps.length === 0) return old;
  const keep = old.steps.filter((s) => s < page.steps[0]).length;
  const steps = [...old.steps.slice(0, keep), ...page.steps];
  const values = {};
  for (const name of new Set([...Object.keys(old.values), ...Object.keys(page.values)])) {
    const before = (old.values[name] || new Array(old.steps.length).fill(null)).slice(0, keep);
    values[name] = [...before, ...(page.values[name] || new Array(page.steps.length).fill(null))];
  }
  return { steps, values };
}

// Some names, in the order of interest; others follow by name.
const GROUPS = ["train", "learner", "policy", "actor", "critic", "engine", "val", "machine", "time", "timing"];
const DRAWN_ABOVE = new Set(["train/reward", "val/reward"]);
const GOAL = "goal/"; // what a callback has measured, because the run is about it
const INTERVAL = [["_low", "_high"], ["/low", "/high"]];

function intervalOf(values, name) {
  for (const [low, high] of INTERVAL) {
    if (values[name + low] && values[name + high]) return { low: values[name + low], high: values[name + high] };
  }
  return {};
}

// What is minimised where no training reward is: the first of these.
const LOSSES = [["learner/nll", "negative log-likelihood per token"], ["learner/loss", "loss"]];

function View({ store, run, metrics }) {
  const { steps, values } = metrics;
  const groups = useMemo(() => grouped(values), [Object.keys(values).join()]);
  const goals = Object.keys(values).filter((name) => name.startsWith(GOAL) && !isBound(values, name)).sort(byName);
  const [loss, lossLabel] = (!values["train/reward"] && LOSSES.find(([name]) => values[name])) || [];
  const [axis, setAxis] = useState("step");
  const [smooth, setSmooth] = useState(false);
  const axes = [["step", "Steps"], values["learner/tokens"] && ["learner/tokens", "Trained tokens"], values.seconds && ["seconds", "Time"]].filter(Boolean);
  const x = useMemo(() => (axis === "step" ? null : sums(values[axis], axis === "seconds" ? 1 / 60 : 1)), [axis, values]);
  const training = useMemo(() => (smooth ? smoothed(values["train/reward"]) : values["train/reward"]), [smooth, values]);
  const isSearch = Boolean(values["prompts/candidates"]);
  const reward = [
    training && { label: "training", color: "--train", values: training, ...(smooth ? {} : intervalOf(values, "train/reward")) },
    isSearch && values["prompts/best"] && { label: "best on validation", color: "--second", values: values["prompts/best"] },
    values["val/reward"] && { label: isSearch ? "validation" : "held-out", color: "--val", width: 2.5, points: true, values: values["val/reward"], ...intervalOf(values, "val/reward") },
  ].filter(Boolean);
  const mode = (step) => (present(values["train/reward"], steps, step) ? "train" : "val");
  const open = (step) => {
    location.hash = href(stepPath(store, run.run_id, mode(step), mode(step) === "train" ? step - 1 : step));
  };
  const validations = steps.filter((_, i) => (values["val/reward"] || [])[i] !== null && values["val/reward"]);
  const trained = steps.filter((_, i) => (values["train/reward"] || [])[i] !== null && values["train/reward"]);
  return html`
    <div class="head">
      <h1>${run.name || run.run_id}</h1>
      <${Status} of=${statusOf(run)} />
      <span class="dim">${[run.algorithm, run.name ? run.run_id : ""].filter(Boolean).join(" · ")}</span>
    </div>
    <${Noted} key=${run.run_id} store=${store} run=${run} />
    ${run.error && html`<div class="failure"><p>${run.error}</p></div>`}
    <dl class="facts">
      <${Fact} label=${isSearch ? "validation reward" : "held-out reward"} title="first → last validation"><${Ends} values=${values["val/reward"]} /><//>
      ${values["held_out/score"] &&
      html`<${Fact} label="held-out score" title=${`start → result, p = ${num(known(values["held_out/p_value"])[0])}`}>
        <${Ends} values=${[...known(values["held_out/start/score"]), ...known(values["held_out/score"])]} />
      <//>`}
      ${loss
        ? html`<${Fact} label="training loss" title=${`${lossLabel}, first → last step`}><${Ends} values=${values[loss]} less /><//>`
        : html`<${Fact} label="training reward" title="first → last step"><${Ends} values=${values["train/reward"]} /><//>`}
      <${Fact} label="steps">${num(run.step)}${run.steps ? html`<span class="dim"> of ${num(run.steps)}</span>` : ""}<//>
      ${values["learner/tokens"] && html`<${Fact} label="trained tokens">${num(total(values["learner/tokens"]))}<//>`}
      ${values["train/tokens_unmerged"] &&
      html`<${Fact} label="saved by merging" title="tokens shared by calls of one conversation are computed once">
        ${num(100 * (1 - total(values["train/tokens"]) / Math.max(1, total(values["train/tokens_unmerged"]))), 0)} %
      <//>`}
      ${phases(values).length > 0 &&
      html`<${Fact} label="time goes to" title="of the steps' seconds; with max_staleness, sampling overlaps the others">
        <${Shares} of=${phases(values)} />
      <//>`}
      ${phases(values, ROLLOUT).length > 0 &&
      html`<${Fact} label="a rollout's time" title="of the seconds of training rollouts: waiting for models, for tools, in the reward function, and in the agent's own code">
        <${Shares} of=${phases(values, ROLLOUT)} />
      <//>`}
      ${(values["train/cost_usd"] || values["val/cost_usd"]) &&
      html`<${Fact} label="other models" title="price of their calls, judges' included, in rollouts that succeeded">
        ${dollars(total(values["train/cost_usd"]) + total(values["val/cost_usd"]))}
      <//>`}
      <${Fact} label=${run.ended_at ? "took" : "steps took"} title=${clock(run.created_at)}>${duration(run.ended_at ? run.ended_at - run.created_at : total(values.seconds))}<//>
      <${Fact} label="last write" title=${clock(run.updated_at)}>${ago(run.updated_at)}<//>
    </dl>
    ${steps.length === 0
      ? html`<p class="empty">No step has been recorded yet.${run.status === "running" ? " This page updates every two seconds." : ""}</p>`
      : html`
          ${goals.map(
            (name) => html`<section class="card">
              <${Plot} key=${name} label=${name.slice(GOAL.length)} steps=${steps} series=${[{ label: "", color: "--val", width: 2.5, points: true, values: values[name], ...intervalOf(values, name) }]} height=${260} x=${x} />
            </section>`,
          )}
          ${loss &&
          html`<section class="card">
            <${Plot} label=${lossLabel} steps=${steps} series=${[{ label: "training", color: "--train", width: 2.5, values: values[loss], points: sparse(values[loss]) }]} height=${260} x=${x} />
          </section>`}
          <section class="card">
            ${reward.length > 0 && html`<${Plot} label=${axis === "seconds" ? "reward by minutes" : axis === "step" ? "reward" : "reward by trained tokens"} steps=${steps} series=${reward} height=${260} unit onPick=${open} x=${x} />`}
            <div class="picks">
              ${axes.length > 1 && html`<${Switch} label="x axis" options=${axes} value=${axis} onChange=${setAxis} />`}
              ${trained.length > 2 && html`<label class="tick"><input type="checkbox" checked=${smooth} onChange=${(event) => setSmooth(event.target.checked)} /> smooth</label>`}
              <${StepPicker} store=${store} run=${run} trained=${trained} />
              <a class="button" href=${href([store, "run", run.run_id, "search"])}>Search rollouts</a>
              ${validations.length > 0 && html`<${Validations} ...${{ validations, path: (s) => href(stepPath(store, run.run_id, "val", s)) }} />`}
            </div>
          </section>
          ${isSearch && html`<${Prompts} store=${store} run=${run} />`}
          <${Memory} store=${store} run=${run} />
          <${Now} store=${store} run=${run} />
          ${groups.map(
            ([group, names]) => html`<section>
              <h2>${group}</h2>
              <div class="plots">
                ${names.filter((name) => !isConstant(values[name])).map((name) => {
                  const series = [{ label: "", color: "--train", values: values[name], ...intervalOf(values, name), points: sparse(values[name]) }];
                  return html`<${Plot} key=${name} small label=${within(name)} steps=${steps} series=${series} height=${120} />`;
                })}
              </div>
              <dl class="constants">
                ${names
                  .filter((name) => isConstant(values[name]))
                  .map((name) => html`<div><dt>${within(name)}</dt><dd>${num(known(values[name])[0])}</dd></div>`)}
              </dl>
            </section>`,
          )}
        `}
    <section>
      <details>
        <summary><h2>settings</h2></summary>
        <table class="pairs"><tbody>
          ${Object.entries(run.config).map(([name, value]) => html`<tr><th scope="row">${name}</th><td>${typeof value === "object" && value !== null ? html`<${Value} value=${value} />` : String(value)}</td></tr>`)}
          <tr><th scope="row">run</th><td>${run.run_id}</td></tr>
          <tr><th scope="row">directory</th><td>${run.directory}</td></tr>
          <tr><th scope="row">store</th><td>${run.store_name}</td></tr>
          <tr><th scope="row">started</th><td>${clock(run.created_at)}</td></tr>
        </tbody></table>
      </details>
    </section>
  `;
}

// What looked wrong, and rollouts of the last step; read again with each step.
function Now({ store, run }) {
  const path = `${store}/runs/${encodeURIComponent(run.run_id)}/now?step=${run.step}`;
  const state = useData(path);
  const last = useRef(null);
  last.current = state.data || last.current;
  const data = last.current;
  if (!data) return null;
  const steps = (alert) => (alert.since === alert.step ? `step ${num(alert.step)}` : `steps ${num(alert.since)} to ${num(alert.step)}`);
  return html`
    ${data.alerts.length > 0 &&
    html`<section>
      <h2>alerts</h2>
      <ul class="plain">
        ${data.alerts.slice(0, 12).map((alert) => html`<li><span class="warn strong">${steps(alert)}</span> ${alert.policy ? `${alert.policy}: ` : ""}${alert.text}</li>`)}
        ${data.alerts.length > 12 && html`<li class="dim">${num(data.alerts.length - 12)} earlier ones</li>`}
      </ul>
    </section>`}
    ${data.samples.length > 0 &&
    html`<section>
      <h2>samples of step ${num(data.step + 1)}</h2>
      <div class="scroll"><table>
        <thead><tr><th scope="col">rollout</th><th scope="col" class="right">reward</th><th scope="col">task</th><th scope="col">last answer</th><th scope="col" class="right">calls</th></tr></thead>
        <tbody>
          ${data.samples.map(
            (sample) => html`<tr>
              <th scope="row"><a href=${href([store, "rollout", sample.rollout_id])}>${sample.place}</a></th>
              <td class="num right">${num(sample.reward)}</td>
              <td class="task">${oneLine(sample.task)}</td>
              <td class="task">${sample.answer === null ? html`<span class="dim">–</span>` : String(sample.answer)}</td>
              <td class="num right">${num(sample.calls)}</td>
            </tr>`,
          )}
        </tbody>
      </table></div>
    </section>`}
  `;
}

function Shares({ of }) {
  return of.map(([name, share], i) => html`${i > 0 && html`<span class="dim"> · </span>`}${name} ${num(100 * share, 0)} %`);
}

// The share of each phase in the seconds of all steps, the largest first.
function phases(values, prefix = "seconds/") {
  const names = Object.keys(values).filter((name) => name.startsWith(prefix));
  const all = names.map((name) => [name.slice(prefix.length), total(values[name])]);
  const sum = all.reduce((seconds, [, part]) => seconds + part, 0);
  return all.map(([name, part]) => [name, part / sum]).filter(([, share]) => share >= 0.005).sort((a, b) => b[1] - a[1]);
}

// The sum of a number up to each step.
function sums(values, unit) {
  let sum = 0;
  return values.map((value) => (sum += (value ?? 0) * unit));
}

// A moving average that gives the newest value a fifth of the weight.
function smoothed(values) {
  let mean = null;
  return (values || []).map((value) => (value === null ? null : (mean = mean === null ? value : 0.8 * mean + 0.2 * value)));
}

const present = (values, steps, step) => Boolean(values) && values[steps.indexOf(step)] !== null;
const known = (values) => (values || []).filter((v) => v !== null);
const sparse = (values) => known(values).length < 12;
const within = (name) => (name.includes("/") ? name.slice(name.indexOf("/") + 1) : name);

// A number that is the same at every step is no curve.
function isConstant(values) {
  const all = known(values);
  return all.length > 1 && all.every((value) => value === all[0]);
}

function grouped(values) {
  const groups = new Map();
  for (const name of Object.keys(values).sort(byName)) {
    if (DRAWN_ABOVE.has(name) || name.startsWith(GOAL) || isBound(values, name) || isRepeated(values, name)) continue;
    const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "run";
    groups.set(group, [...(groups.get(group) || []), name]);
  }
  const place = (group) => (GROUPS.indexOf(group) + 1 || GROUPS.length + 1) - 1;
  return [...groups].sort(([a], [b]) => place(a) - place(b) || a.localeCompare(b));
}

// Whether it is an end of another number's interval.
const isBound = (values, name) => INTERVAL.flat().some((end) => name.endsWith(end) && values[name.slice(0, -end.length)]);

// A run with one reward records it twice: train/reward and train/reward/NAME.
function isRepeated(values, name) {
  const parent = values[name.slice(0, name.lastIndexOf("/"))];
  return Boolean(parent) && parent.every((value, i) => value === values[name][i]);
}

function Ends({ values, less = false }) {
  const all = known(values);
  if (all.length === 0) return html`<span class="dim">–</span>`;
  const change = all.at(-1) - all[0];
  return html`${all.length > 1 && html`<span class="dim">${num(all[0])} → </span>`}<b>${num(all.at(-1))}</b>
    ${all.length > 1 && html` <small class=${change === 0 || change < 0 === less ? "good" : "bad"}>${signed(change)}</small>`}`;
}

const total = (values) => known(values).reduce((a, b) => a + b, 0);

function Validations({ validations, path }) {
  if (validations.length <= 12) {
    return html`<span class="dim">validations:</span>${validations.map((s) => html`<a class="pill" href=${path(s)}>${num(s)}</a>`)}`;
  }
  return html`<label>validation <select onChange=${(event) => (location.hash = path(event.target.value))}>
    <option>at step …</option>
    ${validations.map((s) => html`<option value=${s}>${num(s)}</option>`)}
  </select></label>`;
}

function StepPicker({ store, run, trained }) {
  if (trained.length === 0) return null;
  function go(event) {
    event.preventDefault();
    const step = Number(event.target.elements.step.value);
    location.hash = href(stepPath(store, run.run_id, "train", step - 1));
  }
  return html`<form class="inline" onSubmit=${go}>
    <label>step <input name="step" type="number" required min=${trained[0]} max=${trained.at(-1)} defaultValue=${trained.at(-1)} value=${trained.at(-1)} /></label>
    <button type="submit">Open</button>
  </form>`;
}
