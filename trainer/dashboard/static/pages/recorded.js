// Programs that were recorded with `agl run` and the like: rollouts that no training asked for.
import { html } from "../vendor/preact-htm.js";
import { useData } from "../lib/api.js";
import { ago, clock, duration, num } from "../lib/format.js";
import { Crumbs, Link, Loaded, TaskText } from "../lib/ui.js";

export function Recorded({ store }) {
  const state = useData(`${store}/rollouts`, { every: 5000 });
  return html`
    <${Crumbs} items=${[]} here="recorded programs" />
    <div class="head"><h1>Recorded programs</h1></div>
    <${Loaded} state=${state}>${(data) => html`
      ${data.rollouts.length < data.total && html`<p class="dim">the newest ${num(data.rollouts.length)} of ${num(data.total)}</p>`}
      ${data.total === 0 && html`<p class="empty">No program was recorded in this store. To record one: agl run -- python my_agent.py</p>`}
      <div class="scroll"><table class="stack">
        <thead><tr><th>rollout</th><th>status</th><th class="right">took</th><th>when</th><th>task</th></tr></thead>
        <tbody>${data.rollouts.map(
          (r) => html`<tr>
            <td><${Link} to=${[store, "rollout", r.rollout_id]}>${r.rollout_id}<//></td>
            <td><span class="status ${{ succeeded: "good", failed: "bad" }[r.status] || ""}">${r.status}</span></td>
            <td class="right num">${r.ended_at ? duration(r.ended_at - r.created_at) : "–"}</td>
            <td class="dim" title=${clock(r.created_at)}>${ago(r.created_at)}</td>
            <td class="wide"><${TaskText} task=${r.task} /></td>
          </tr>`,
        )}</tbody>
      </table></div>`}<//>
  `;
}
