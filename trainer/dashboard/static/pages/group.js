// A group's rollouts side by side, with the place where each begins to differ from the one that it is compared with.
import { html, useState } from "../vendor/preact-htm.js";
import { get, useData } from "../lib/api.js";
import { lines } from "../lib/conversation.js";
import { num } from "../lib/format.js";
import { runPath, setQuery, stepPath } from "../lib/route.js";
import { Advantage, Crumbs, Failure, Link, Loaded, Reward, Value } from "../lib/ui.js";

const AT_ONCE = 4;

export function Group({ store, id, query }) {
  const path = `${store}/rollouts/${encodeURIComponent(id)}/group`;
  const state = useData(path);
  const one = state.data?.rollouts[0];
  const crumbs = one ? trail(store, one) : [];
  return html`
    <${Crumbs} items=${crumbs} here="group" />
    <${Loaded} state=${state}>${(data) => html`<${View} store=${store} data=${data} query=${query} />`}<//>
  `;
}

export function trail(store, rollout) {
  if (rollout.run_id === null || rollout.step === null) return [];
  const step = rollout.mode === "train" ? `step ${rollout.step + 1}` : `${rollout.mode === "val" ? "validation" : rollout.mode} at step ${rollout.step}`;
  return [[rollout.run_id, runPath(store, rollout.run_id)], [step, stepPath(store, rollout.run_id, rollout.mode, rollout.step)]];
}

function View({ store, data, query }) {
  // The best first: what it did right stands next to what the others did.
  const members = [...data.rollouts].sort((a, b) => (b.advantage ?? b.reward ?? -Infinity) - (a.advantage ?? a.reward ?? -Infinity));
  const reference = members.find((m) => m.rollout_id === query.with) || members[0];
  const [shown, setShown] = useState(8);
  const columns = members.slice(0, shown);
  const state = useData(columns.map((m) => m.rollout_id).join(), { read: (_, signal) => reports(store, columns, signal) });
  const known = state.data || {};
  const against = known[reference.rollout_id];
  return html`
    <div class="head"><h1>group</h1><span class="dim">${num(members.length)} rollouts of the same task</span></div>
    <section class="card"><${Value} value=${members[0].task} /></section>
    ${state.error && html`<${Failure} error=${state.error} />`}
    <div class="columns" tabindex="0" role="region" aria-label="the group's rollouts side by side">
      ${columns.map((m) => html`<${Column} key=${m.rollout_id} ...${{ store, member: m, report: known[m.rollout_id], against, reference }} />`)}
    </div>
    ${members.length > shown && html`<p><button type="button" onClick=${() => setShown(shown + 8)}>${num(members.length - shown)} more</button></p>`}
  `;
}

// The reports of several rollouts, a few at a time.
async function reports(store, members, signal) {
  const waiting = [...members];
  const found = {};
  async function worker() {
    while (waiting.length > 0) {
      const { rollout_id: id } = waiting.shift();
      found[id] = await get(`${store}/rollouts/${encodeURIComponent(id)}`, signal);
    }
  }
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  return found;
}

function Column({ store, member, report, against, reference }) {
  const isReference = member === reference;
  const own = report?.calls ? lines(report) : [];
  const other = against?.calls && !isReference ? lines(against) : null;
  const first = other ? own.findIndex((line, i) => firstDifference(line, other[i]) >= 0) : -1;
  const jump = (event) => event.currentTarget.closest("article").querySelector("mark").scrollIntoView({ block: "center" });
  return html`<article class="column ${isReference ? "reference" : ""}">
    <header>
      <div class="row"><${Advantage} value=${member.advantage} dropped=${member.dropped} /><span class="dim">reward <${Reward} value=${member.reward} /></span></div>
      <div class="row small">
        <${Link} to=${[store, "rollout", member.rollout_id]}>${member.rollout_id}<//>
        ${isReference
          ? html`<span class="dim">the reference</span>`
          : html`<button type="button" class="quiet" onClick=${() => setQuery({ with: member.rollout_id })}>Use as reference</button>`}
        ${first >= 0 && html`<button type="button" class="quiet" onClick=${jump}>First difference</button>`}
      </div>
      ${member.error && html`<p class="bad small">${member.error}</p>`}
      <div class="dim small">${num(member.calls)} calls · ${num(member.trained_tokens)} of ${num(member.tokens)} tokens trained${member.forks ? ` · ${member.forks} forked` : ""}</div>
    </header>
    ${!report && html`<p class="dim">Loading …</p>`}
    ${report?.pruned && html`<p class="dim">Its texts were pruned from the store.</p>`}
    ${own.map((line, i) => {
      const at = i === first ? firstDifference(line, other[i]) : -1;
      const before = other && (first < 0 || i < first);
      return html`<div class="line ${line.sampled ? "sampled" : ""} ${before ? "same" : ""}">
        <div class="role">${line.role}</div>
        <p>${at >= 0 ? html`<span class="same">${line.text.slice(0, at)}</span><mark title="the first difference">${word(line.text, at)}</mark>${line.text.slice(at + word(line.text, at).length)}` : line.text}</p>
      </div>`;
    })}
    ${report?.calls && other && first < 0 && html`<p class="dim">same text as the reference</p>`}
    ${report?.next && html`<p class="dim">… the rest is on the rollout's page</p>`}
  </article>`;
}

// Where two lines begin to differ; -1 if they do not.
function firstDifference(line, other) {
  if (!other || line.role !== other.role) return 0;
  const length = Math.min(line.text.length, other.text.length);
  for (let i = 0; i < length; i += 1) if (line.text[i] !== other.text[i]) return i;
  return line.text.length === other.text.length ? -1 : length;
}

const word = (text, at) => /^\s*\S*/.exec(text.slice(at))[0] || "∎";
