// What every runner is doing now.
import { html } from "../vendor/preact-htm.js";
import { useData } from "../lib/api.js";
import { ago, clock, duration, num } from "../lib/format.js";
import { Crumbs, Fact, Link, Loaded } from "../lib/ui.js";

export function Runners({ store }) {
  const state = useData(`${store}/runners`, { every: 2000 });
  return html`
    <${Crumbs} items=${[]} here="runners" />
    <div class="head"><h1>Runners</h1></div>
    <${Loaded} state=${state}>${(data) => html`<${View} store=${store} data=${data} />`}<//>
  `;
}

function View({ store, data }) {
  const open = data.workers.reduce((sum, w) => sum + w.attempts.length, 0);
  return html`
    <dl class="facts">
      <${Fact} label="active runners">${num(data.workers.length)}<//>
      <${Fact} label="rollouts running">${num(open)}${data.complete ? "" : " or more"}<//>
      <${Fact} label="waiting">${num(data.waiting)}<//>
    </dl>
    ${data.workers.length === 0 && html`<p class="empty">No rollout is running.</p>`}
    ${data.workers.map(
      ({ worker, attempts }) => html`<section class="card">
        <h2 class="mono">${worker || "unnamed"}</h2>
        <div class="scroll"><table>
          <thead><tr><th>rollout</th><th class="right">attempt</th><th>status</th><th class="right">running for</th><th>last heartbeat</th></tr></thead>
          <tbody>${attempts.map(
            (a) => html`<tr>
              <td><${Link} to=${[store, "rollout", a.rollout_id]}>${a.rollout_id}<//></td>
              <td class="right">${a.attempt}</td>
              <td>${a.status}</td>
              <td class="right num">${duration(Math.max(0, data.now - a.started_at))}</td>
              <td class="dim" title=${clock(a.last_heartbeat_at)}>${ago(a.last_heartbeat_at)}</td>
            </tr>`,
          )}</tbody>
        </table></div>
      </section>`,
    )}
  `;
}
