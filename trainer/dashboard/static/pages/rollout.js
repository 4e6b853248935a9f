// One rollout: which tokens were trained with what credit, what was said, and everything that happened.
import { html, useState } from "../vendor/preact-htm.js";
import { get, useData } from "../lib/api.js";
import { Message } from "../lib/conversation.js";
import { clock, dollars, duration, num, oneLine, signed } from "../lib/format.js";
import { href, parse, setQuery } from "../lib/route.js";
import { Spans } from "../lib/spans.js";
import { ColorSwitch, FOLDED, Tokens } from "../lib/tokens.js";
import { Crumbs, Fact, Failure, Link, Loaded, Switch, Value } from "../lib/ui.js";
import { trail } from "./group.js";
import { Label } from "./noted.js";

export function Rollout({ store, id, query }) {
  const path = `${store}/rollouts/${encodeURIComponent(id)}${query.attempt ? `?attempt=${query.attempt}` : ""}`;
  const state = useData(path);
  const rollout = state.data?.rollout;
  const crumbs = rollout ? trail(store, rollout) : [];
  if (state.data?.siblings.length > 1) crumbs.push(["group", [store, "group", rollout.rollout_id]]);
  return html`
    <${Crumbs} items=${crumbs} here=${rollout?.rollout_id || id} />
    <${Loaded} state=${state}>${(data) => html`<${View} key=${path} ...${{ store, path, first: data, query }} />`}<//>
  `;
}

const VIEWS = [
  ["tokens", "Tokens"],
  ["conversation", "Conversation"],
  ["spans", "Spans"],
];

function View({ store, path, first, query }) {
  const { rollout, attempts, siblings } = first;
  const [rest, setRest] = useState({ calls: [], next: first.next, error: null });
  const calls = first.calls ? joined([...first.calls, ...rest.calls]) : [];
  async function more() {
    const [call, token] = rest.next;
    try {
      const page = await get(`${path}${path.includes("?") ? "&" : "?"}call=${call}&token=${token}`);
      setRest({ calls: [...rest.calls, ...page.calls], next: page.next, error: null });
    } catch (error) {
      setRest({ ...rest, error });
    }
  }
  const at = siblings.indexOf(rollout.rollout_id);
  const neighbour = (by, text) => siblings[at + by] && html`<${Link} to=${[store, "rollout", siblings[at + by]]} query=${{ view: query.view, color: query.color }}>${text}<//>`;
  const view = query.view || (calls.some((c) => c.n_tokens > 0) ? "tokens" : first.n_provider_calls > 0 ? "conversation" : "spans");
  return html`
    <div class="head">
      <h1 class="mono">${rollout.rollout_id}</h1>
      <span class="status ${{ succeeded: "good", failed: "bad" }[rollout.status] || ""}">${rollout.status}</span>
      ${siblings.length > 1 && html`<nav class="around" aria-label="rollouts of the group">${neighbour(-1, "← Previous")}<span class="dim">${at + 1} of ${siblings.length}</span>${neighbour(1, "Next →")}</nav>`}
    </div>
    ${first.pruned ? html`<${Pruned} trained=${first.trained} />` : html`<${Facts} ...${{ rollout, first, calls }} />`}
    <section class="card two">
      <div><h2>task</h2><${Value} value=${rollout.task} /></div>
      ${first.output !== undefined && html`<div><h2>output</h2><pre class="value" tabindex="0">${first.output ?? "–"}</pre></div>`}
    </section>
    <${Rewards} report=${first} calls=${calls} />
    ${first.rewards && html`<${Label} key=${rollout.rollout_id} store=${store} rollout=${rollout.rollout_id} rewards=${first.rewards} />`}
    <${Attempts} attempts=${attempts} shown=${first.attempt} />
    ${first.calls &&
    html`
      ${first.n_provider_calls > 0 && html`<p class="note">${num(first.n_provider_calls)} calls were answered by a model that is not a policy, so there are no token ids to train.${paid(first)}</p>`}
      <div class="bar-row">
        <${Switch} label="view" options=${VIEWS} value=${view} onChange=${(name) => setQuery({ view: name })} />
        ${view === "tokens" && html`<${ColorSwitch} query=${query} />`}
      </div>
      ${view === "tokens" && html`<${Tokens} calls=${calls} rows=${first.rows} query=${query} />`}
      ${view === "conversation" && html`<${Conversation} calls=${calls} provider_calls=${first.provider_calls} omitted=${first.n_provider_calls - first.provider_calls.length} />`}
      ${view === "spans" && html`<${Spans} spans=${first.spans} omitted=${first.omitted_spans} />`}
      ${rest.error && html`<${Failure} error=${rest.error} />`}
      ${rest.next && view !== "spans" && html`<p><button type="button" onClick=${more}>Show more: ${num(calls.length)} of ${num(first.n_calls)} calls shown</button></p>`}
    `}
  `;
}

// What other models' calls cost, as far as it is known.
function paid({ cost, n_priced, n_provider_calls }) {
  if (cost === null) return "";
  const missing = n_provider_calls - n_priced;
  return missing ? ` They cost ${dollars(cost)}; the price of ${num(missing)} is not known.` : ` They cost ${dollars(cost)}.`;
}

// A call that was read in two parts is one call.
function joined(calls) {
  const out = [];
  for (const call of calls) {
    const before = out.at(-1);
    if (before?.position === call.position) {
      const tokens = {};
      for (const name of Object.keys(call.tokens)) tokens[name] = [...before.tokens[name], ...call.tokens[name]];
      out[out.length - 1] = { ...before, tokens };
    } else out.push(call);
  }
  return out;
}

function Facts({ rollout, first, calls }) {
  const trained = calls.reduce((sum, c) => sum + c.tokens.trained.filter(Boolean).length, 0);
  const sampled = calls.reduce((sum, c) => sum + c.n_tokens, 0);
  const wasTrained = calls.some((c) => c.step !== null && !c.dropped);
  const dropped = calls.find((c) => c.dropped)?.dropped;
  const advantages = calls.map((c) => c.advantage).filter((a) => a !== null);
  const versions = [...new Set(calls.filter((c) => c.policy).map((c) => `${c.policy} v${c.policy_version}`))];
  return html`<dl class="facts">
    <${Fact} label="reward">${num(first.total_reward)}<//>
    <${Fact} label="advantage">
      ${dropped ? html`<span class="warn">${dropped}</span>` : advantages.length ? spanOf(advantages) : html`<span class="dim">${rollout.mode === "train" ? "not trained" : "not a training rollout"}</span>`}
    <//>
    <${Fact} label=${wasTrained ? "trained tokens" : "sampled tokens"}>${wasTrained ? html`${num(trained)} <span class="dim">of ${num(sampled)}</span>` : num(sampled)}<//>
    <${Fact} label="calls">${num((first.n_calls ?? 0) + (first.n_provider_calls ?? 0))}${first.rows?.length ? html` <span class="dim">in ${num(first.rows.length)} ${first.rows.length === 1 ? "row" : "rows"}</span>` : ""}<//>
    <${Fact} label="sampled by">${versions.join(", ") || "–"}<//>
    <${Fact} label="took" title=${clock(rollout.created_at)}>${rollout.ended_at ? duration(rollout.ended_at - rollout.created_at) : "not ended"}<//>
  </dl>`;
}

function spanOf(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  return low === high ? signed(low) : `${signed(low)} to ${signed(high)}`;
}

function Rewards({ report, calls }) {
  if (!report.calls) return null;
  const of = [...report.rewards.map((r) => [r, null]), ...calls.flatMap((c) => c.rewards.map((r) => [r, c]))];
  if (of.length === 0) return html`<p class="note">No reward was recorded.</p>`;
  // The reward above says it all.
  if (of.length === 1 && of[0][1] === null && of[0][0].source === "return" && !of[0][0].agent) return null;
  return html`<section class="scroll"><table class="rewards">
    <thead><tr><th>reward</th><th class="right">value</th><th>earned by</th><th>from</th></tr></thead>
    <tbody>
      ${of.map(
        ([reward, call]) => html`<tr>
          <td>${reward.name}${reward.primary ? "" : html` <span class="dim">(not primary)</span>`}</td>
          <td class="right num">${num(reward.value)}</td>
          <td>${call ? html`<a href=${hereWith({ view: "tokens", call: call.position })}>call ${call.index}</a> · ${call.agent}` : html`the whole rollout${reward.agent ? ` of ${reward.agent}` : ""}`}</td>
          <td class="dim">${{ return: "the reward function", emit: "emit_reward", air: "AIR", label: "a person" }[reward.source] || reward.source}${reward.explanation && html`<div>${reward.explanation}</div>`}</td>
        </tr>`,
      )}
    </tbody>
  </table></section>`;
}

function hereWith(changes) {
  const { parts, query } = parse(location.hash);
  return href(parts, { ...query, ...changes });
}

function Attempts({ attempts, shown }) {
  if (attempts.length < 2 && !attempts.some((a) => a.error)) return null;
  return html`<section><h2>attempts</h2><ul class="plain">
    ${attempts.map(
      (a) => html`<li>
        ${attempts.length > 1 && a.attempt !== shown ? html`<a href=${hereWith({ attempt: a.attempt })}>attempt ${a.attempt}</a>` : html`attempt ${a.attempt}`}
        <span class="status ${{ succeeded: "good", failed: "bad", timeout: "bad" }[a.status] || "warn"}">${a.status}</span>
        <span class="dim">${a.worker_id || ""}</span>
        ${a.error && html`<details><summary class="bad clip">${a.cause}</summary><pre class="value" tabindex="0">${a.error}</pre></details>`}
      </li>`,
    )}
  </ul></section>`;
}

function Pruned({ trained }) {
  return html`<div class="failure">
    <p><strong>This rollout's calls and spans were pruned from the store.</strong></p>
    <p>Its task and training records remain.</p>
  </div>
  ${trained.length > 0 &&
  html`<div class="scroll"><table>
    <thead><tr><th>call</th><th class="right">step</th><th class="right">reward</th><th class="right">return</th><th class="right">advantage</th><th class="right">tokens</th></tr></thead>
    <tbody>${trained.map((t) => html`<tr><td>${t.call_id}</td><td class="right">${t.step}</td><td class="right">${num(t.reward)}</td><td class="right">${num(t.return_)}</td><td class="right">${t.dropped || signed(t.advantage)}</td><td class="right">${num(t.tokens)}</td></tr>`)}</tbody>
  </table></div>`}`;
}

function Conversation({ calls, provider_calls, omitted }) {
  const open = calls.length + provider_calls.length <= FOLDED;
  return html`<div class="conversation">
    ${calls.map(
      (call) => html`<details open=${open}>
        <summary><h3>call ${call.index} <span class="dim">· ${call.agent}${call.policy ? ` · ${call.policy} v${call.policy_version}` : " · not trained"}</span>${call.fork && html` <span class="warn">forked</span>`}</h3></summary>
        ${call.fork && html`<p class="note warn">forked: ${call.fork}</p>`}
        ${call.messages.map((m) => html`<${Message} message=${m} />`)}
        ${call.error ? html`<p class="bad">${call.error}</p>` : html`<${Message} message=${{ role: "assistant", ...call.reply }} kind="sampled" />`}
      </details>`,
    )}
    ${provider_calls.map(
      (call) => html`<details open=${open}>
        <summary><h3>${call.agent || "call"} <span class="dim">· ${call.model || "another model"} · not trained</span></h3></summary>
        ${call.messages.map((m) => html`<${Message} message=${m} />`)}
        ${call.reply && html`<${Message} message=${call.reply} />`}
        ${call.error && html`<p class="bad">${call.error}</p>`}
      </details>`,
    )}
    ${omitted > 0 && html`<p class="dim">and ${num(omitted)} more calls: see the spans</p>`}
    ${calls.length + provider_calls.length === 0 && html`<p class="empty">No model was called.</p>`}
  </div>`;
}
