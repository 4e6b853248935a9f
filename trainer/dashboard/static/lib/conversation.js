// What was said: a call's new messages, its reply, and what its tools answered.
import { html } from "../vendor/preact-htm.js";
import { messageText, toolCalls } from "./format.js";

export function Message({ message, kind = "", children }) {
  const calls = toolCalls(message);
  const text = messageText(message);
  return html`<div class="message ${kind} role-${/^[a-z]+$/.test(message.role || "") ? message.role : "other"}">
    <div class="role">${message.role || "?"}${message.name ? ` · ${message.name}` : ""}</div>
    <div class="said">
      ${message.reasoning_content && html`<p class="dim">${message.reasoning_content}</p>`}
      ${text && html`<p>${text}</p>`}
      ${calls.map((call) => html`<p class="call"><b>${call.name}</b>(${call.args})</p>`)}
      ${children}
    </div>
  </div>`;
}

// The conversation of a rollout as lines of text, so that two can be compared: [{role, text}].
export function lines(report) {
  const out = [];
  for (const call of report.calls) {
    for (const message of call.messages) out.push({ role: message.role || "?", text: textOf(message) });
    out.push({ role: `${call.agent}`, text: call.error ? `error: ${call.error}` : textOf(call.reply), sampled: true, call: call.index });
  }
  return out;
}

function textOf(message) {
  return [messageText(message), ...toolCalls(message).map((c) => `${c.name}(${c.args})`)].filter(Boolean).join("\n");
}
