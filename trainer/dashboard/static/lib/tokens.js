// The sampled tokens as they were trained: coloured by advantage, log-prob, or by how strongly the update moves each of them.
import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { Message } from "./conversation.js";
import { num, signed, toolCalls } from "./format.js";
import { setQuery } from "./route.js";
import { Advantage, Scale, Switch, advantageClass } from "./ui.js";

const COLORS = [
  ["advantage", "Advantage"],
  ["logprob", "Log-prob"],
  ["pull", "Gradient weight"],
];
const LEGEND = {
  advantage: ["less likely", "more likely", "The advantage of the token's call: the steps are 0.01, 0.1, 0.3, 1 and 3."],
  logprob: ["likely", "unlikely", "The log-prob when the token was sampled: the darker, the less likely."],
  pull: ["less likely", "more likely", "advantage × (1 − p): how strongly the update moves the token's own logit. A near-certain token hardly moves."],
};

// Above so many calls each is a line that opens.
export const FOLDED = 8;

const colorOf = (query) => (LEGEND[query.color] ? query.color : "advantage");

export function ColorSwitch({ query }) {
  const color = colorOf(query);
  return html`
    <${Switch} label="colour by" options=${COLORS} value=${color} onChange=${(name) => setQuery({ color: name })} />
    <${Legend} color=${color} />
  `;
}

export function Tokens({ calls, rows, query }) {
  const color = colorOf(query);
  const [at, setAt] = useState(null);
  const wanted = query.call === undefined ? null : Number(query.call);
  const [all, setAll] = useState(null);
  const folded = all === null ? calls.length > FOLDED : !all;
  return html`
    ${calls.length > FOLDED && html`<p><button type="button" onClick=${() => setAll(folded)}>${folded ? `Unfold all ${num(calls.length)} calls` : "Fold all calls"}</button></p>`}
    ${calls.map((call) => html`<${Call} key=${`${call.position} ${all}`} ...${{ call, calls, color, setAt, folded, wanted: wanted === call.position, token: query.token }} />`)}
    ${calls.length === 0 && html`<p class="empty">No tokens: no call went through the gateway.</p>`}
    <${Rows} rows=${rows} />
    <${Detail} at=${at} />
  `;
}

function Legend({ color }) {
  const [low, high, about] = LEGEND[color];
  const classes = color === "logprob" ? ["l0", "l1", "l2", "l3", "l4", "l5"] : undefined;
  return html`<${Scale} ...${{ low, high, classes, about }}><i class="off"></i><span class="dim">not trained</span><//>`;
}

function classOf(call, i, color) {
  const logprob = call.tokens.logprobs[i];
  if (color === "logprob") {
    // Half a nat, 1, 2, 4, 8: a token at -8 was drawn once in 3,000 times.
    return `l${logprob === null ? 5 : [0.05, 0.5, 1, 2, 4].filter((edge) => -logprob > edge).length}`;
  }
  if (call.advantage === null) return "";
  const pull = color === "pull" ? call.advantage * (1 - Math.exp(logprob ?? 0)) : call.advantage;
  return advantageClass(pull);
}

function Call({ call, calls, color, setAt, folded, wanted, token }) {
  const [open, setOpen] = useState(!folded || wanted);
  const card = useRef(null);
  const strip = useRef(null);
  useEffect(() => {
    if (!wanted) return;
    if (!open) setOpen(true);
    card.current.scrollIntoView({ block: "start" });
    strip.current?.querySelector(`[data-i="${CSS.escape(token || "0")}"]`)?.focus();
  }, [wanted, token, open]);
  const parent = calls.find((c) => c.id === call.parent);
  const index = (event) => event.target.dataset?.i;
  const show = (event) => index(event) !== undefined && setAt({ call, i: Number(index(event)) });
  function keys(event) {
    const move = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
    if (event.key === "Home" || event.key === "End") {
      event.preventDefault();
      strip.current[event.key === "Home" ? "firstElementChild" : "lastElementChild"]?.focus();
    } else if (move) {
      let next = event.target[move];
      while (next && next.dataset.i === undefined) next = next[move];
      event.preventDefault();
      next?.focus();
    } else if (event.key === "Enter" && index(event) !== undefined) {
      setQuery({ call: call.position, token: index(event) });
    }
  }
  const { texts, trained } = call.tokens;
  const facts = [
    `${num(call.prompt_tokens)} prompt tokens${call.continued ? `, ${num(call.continued)} continued from ${parent ? `call ${parent.index}` : "the previous call"}` : ""}`,
    `${num(call.n_tokens)} sampled`,
    call.finish_reason,
    call.temperature === 1 ? "" : `temperature ${num(call.temperature)}`,
  ];
  const head = html`<h3><button type="button" class="fold" aria-expanded=${open ? "true" : "false"} onClick=${() => setOpen(!open)}>call ${call.index}</button></h3>`;
  if (!open) {
    const names = toolCalls(call.reply || {}).map((c) => `${c.name}()`);
    return html`<article class="card call-card folded" ref=${card}>
      <header>
        ${head}
        <b>${call.agent}</b>
        <span class="dim clip">${[`${num(call.n_tokens)} sampled`, ...names].join(" · ")}</span>
        ${call.fork && html`<span class="warn">forked</span>`}
        ${call.error && html`<span class="bad">failed</span>`}
        ${call.rewards.map((r) => html`<span class="strong">${r.name} ${num(r.value)}</span>`)}
        <span class="grow"></span>
        ${(call.advantage !== null || call.dropped) && html`<${Advantage} value=${call.advantage} dropped=${call.dropped} />`}
      </header>
    </article>`;
  }
  return html`<article class="card call-card" ref=${card}>
    <header>
      ${head}
      <b>${call.agent}</b>
      <span class="dim">${call.policy ? `${call.policy} v${call.policy_version}` : "not trained"}</span>
      <span class="grow"></span>
      ${call.return_ !== null && html`<span class="dim">return ${num(call.return_)}</span>`}
      ${(call.advantage !== null || call.dropped) && html`<${Advantage} value=${call.advantage} dropped=${call.dropped} />`}
      ${call.sequence !== null && html`<span class="dim">row ${call.sequence}</span>`}
    </header>
    ${call.fork && html`<p class="note warn">forked: ${call.fork}</p>`}
    ${call.messages.map((m) => html`<${Message} message=${m} />`)}
    ${call.error && html`<p class="bad">${call.error}</p>`}
    ${texts.length > 0 &&
    html`<div class="tokens" ref=${strip} role="list" aria-label=${`tokens of call ${call.index}; arrow keys move`} onMouseOver=${show} onfocusin=${show} onClick=${show} onKeyDown=${keys}>
      ${texts.map((text, i) => {
        const kind = `tok ${classOf(call, i, color)} ${trained[i] && call.dropped === null ? "" : "off"}`;
        return html`<span class=${kind} role="listitem" data-i=${i} tabindex=${i === 0 ? 0 : -1} aria-label=${ariaOf(call, i)}>${text.replaceAll("\n", "⏎\n")}</span>`;
      })}
    </div>`}
    ${call.rewards.length > 0 && html`<p class="note">earned ${call.rewards.map((r) => `${r.name} ${num(r.value)}`).join(", ")}</p>`}
    <p class="dim small">${facts.filter(Boolean).join(" · ")}</p>
  </article>`;
}

const ariaOf = (call, i) => `${call.tokens.texts[i]}, log-prob ${num(call.tokens.logprobs[i])}`;

function Detail({ at }) {
  if (!at) return html`<div class="detail dim" role="status">Point at a token, or use the arrow keys.</div>`;
  const { call, i } = at;
  const logprob = call.tokens.logprobs[i];
  const trained = call.tokens.trained[i] && call.dropped === null;
  return html`<div class="detail" role="status">
    <code class="piece">${call.tokens.texts[i].replaceAll("\n", "⏎")}</code>
    <span>id <b>${call.tokens.ids[i]}</b></span>
    <span>log-prob <b>${num(logprob, 4)}</b></span>
    <span>p <b>${logprob === null ? "–" : num(Math.exp(logprob), 4)}</b></span>
    ${call.advantage !== null && html`<span>advantage <b>${signed(call.advantage)}</b></span>`}
    ${call.advantage !== null && logprob !== null && html`<span>gradient weight <b>${signed(call.advantage * (1 - Math.exp(logprob)), 4)}</b></span>`}
    <span>${call.policy ? html`sampled by <b>${call.policy} v${call.policy_version}</b>` : ""}</span>
    <span class=${trained ? "good" : "dim"}>${trained && call.step !== null ? `trained in step ${call.step}` : call.dropped ? `not trained: ${call.dropped}` : "not trained"}</span>
    <span class="dim">call ${call.index}, token ${i}</span>
  </div>`;
}

function Rows({ rows }) {
  if (rows.length === 0) return null;
  return html`<section class="scroll"><h2>training rows</h2><table>
    <thead><tr><th>policy</th><th>calls merged</th><th class="right">tokens</th><th class="right">trained</th><th class="right">tokens if unmerged</th><th>shape</th></tr></thead>
    <tbody>
      ${rows.map((r) => html`<tr><td>${r.policy}</td><td>${r.calls.join(" + ")}</td><td class="right num">${num(r.tokens)}</td><td class="right num">${num(r.trained)}</td><td class="right num">${num(r.unmerged_tokens)}</td><td>${r.is_chain ? "chain" : "tree"}</td></tr>`)}
    </tbody>
  </table></section>`;
}
