// Everything that happened in an attempt as a tree with times.
import { html, useMemo } from "../vendor/preact-htm.js";
import { duration, num } from "./format.js";
import { Value } from "./ui.js";

export function Spans({ spans, omitted }) {
  const tree = useMemo(() => nested(spans), [spans]);
  const length = Math.max(...spans.map((s) => s.begun + s.seconds)) || 1;
  if (spans.length === 0) return html`<p class="empty">No span was recorded.</p>`;
  return html`<ul class="tree">${tree.map((node) => html`<${Node} key=${node.span.span_id} node=${node} length=${length} />`)}</ul>
    ${omitted > 0 && html`<p class="dim">${num(omitted)} later spans are not shown: agl trace show</p>`}`;
}

// The spans come in the order in which they began.
function nested(spans) {
  const nodes = new Map(spans.map((span) => [span.span_id, { span, children: [] }]));
  const top = [];
  for (const node of nodes.values()) {
    const parent = nodes.get(node.span.parent_id);
    (parent && parent !== node ? parent.children : top).push(node);
  }
  return top;
}

function Node({ node, length }) {
  const { span, children } = node;
  const bar = { left: `${(span.begun / length) * 100}%`, width: `${Math.max(0.4, (span.seconds / length) * 100)}%` };
  const about = summary(span);
  return html`<li>
    <details>
      <summary>
        <span class="what ${span.status === "error" ? "bad" : ""}">${span.name}</span>
        <span class="clip dim">${about}</span>
        <span class="when"><i style=${bar}></i></span>
        <span class="num dim took">${duration(span.seconds)}</span>
      </summary>
      ${span.status_message && html`<p class="bad">${span.status_message}</p>`}
      <table class="pairs"><tbody>
        ${Object.entries(span.attributes).map(([name, value]) => html`<tr><th scope="row">${name}</th><td><${Value} value=${value} /></td></tr>`)}
        ${span.events.map((e) => html`<tr><th scope="row">${e.name}</th><td><${Value} value=${e.attributes} /></td></tr>`)}
      </tbody></table>
    </details>
    ${children.length > 0 && html`<ul>${children.map((child) => html`<${Node} key=${child.span.span_id} node=${child} length=${length} />`)}</ul>`}
  </li>`;
}

function summary({ attributes: a, agent, operation }) {
  const tokens = a["gen_ai.usage.output_tokens"] === undefined ? "" : `${num(a["gen_ai.usage.input_tokens"])} → ${num(a["gen_ai.usage.output_tokens"])} tokens`;
  const result = a["gen_ai.tool.call.result"];
  const args = a["gen_ai.tool.call.arguments"];
  const tool = args === undefined ? "" : `${text(args)}${result === undefined ? "" : ` → ${text(result)}`}`;
  return [operation === "invoke_agent" ? "" : agent, tokens, tool].filter(Boolean).join(" · ");
}

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
