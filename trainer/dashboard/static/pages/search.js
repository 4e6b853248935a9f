// Rollouts of all steps of a run by what they said, who spoke, what was called, their reward.
import { html, useState } from "../vendor/preact-htm.js";
import { get, useData } from "../lib/api.js";
import { num } from "../lib/format.js";
import { href, runPath, stepPath } from "../lib/route.js";
import { Advantage, Crumbs, Failure, Link, Loaded, Reward, TaskText } from "../lib/ui.js";

const FIELDS = ["text", "agent", "tool", "least", "most", "failed", "mode"];

export function Search({ store, id, query }) {
  const asked = new URLSearchParams(FIELDS.filter((name) => query[name]).map((name) => [name, query[name]]));
  const path = `${store}/runs/${encodeURIComponent(id)}/search?${asked}`;
  const state = useData(path);
  function search(event) {
    event.preventDefault();
    const form = new FormData(event.target);
    location.hash = href([store, "run", id, "search"], Object.fromEntries(FIELDS.map((name) => [name, form.get(name)])));
  }
  return html`
    <${Crumbs} items=${[[id, runPath(store, id)]]} here="search" />
    <h1>Rollouts of all steps</h1>
    <form class="filters" onSubmit=${search} key=${`${asked}`}>
      <label>text <input type="search" name="text" value=${query.text || ""} placeholder="in task, messages, answers, error" /></label>
      <label>agent <input name="agent" value=${query.agent || ""} size="10" /></label>
      <label>tool <input name="tool" value=${query.tool || ""} size="10" /></label>
      <label>reward from <input name="least" type="number" step="any" value=${query.least || ""} /></label>
      <label>to <input name="most" type="number" step="any" value=${query.most || ""} /></label>
      <label class="tick"><input type="checkbox" name="failed" value="1" checked=${Boolean(query.failed)} /> failed</label>
      <label>of <select name="mode">${["train", "val", "dev"].map((mode) => html`<option value=${mode} selected=${mode === (query.mode || "train")}>${MODES[mode]}</option>`)}</select></label>
      <button type="submit">Search</button>
    </form>
    <${Loaded} state=${state}>${(data) => html`<${Found} key=${path} ...${{ store, id, path, first: data }} />`}<//>
  `;
}

const MODES = { train: "training", val: "validations", dev: "dry runs" };

function Found({ store, id, path, first }) {
  const [rest, setRest] = useState({ rollouts: [], next: first.next, error: null });
  const rollouts = [...first.rollouts, ...rest.rollouts];
  async function more() {
    try {
      const page = await get(`${path}&before=${encodeURIComponent(rest.next)}`);
      setRest({ rollouts: [...rest.rollouts, ...page.rollouts], next: page.next, error: null });
    } catch (error) {
      setRest({ ...rest, error });
    }
  }
  if (rollouts.length === 0) return html`<p class="empty">No rollout matches.</p>`;
  return html`<div class="scroll"><table class="stack found">
      <thead><tr><th>task</th><th>step</th><th>reward</th><th>advantage</th><th>agents</th><th>error</th></tr></thead>
      <tbody>${rollouts.map(
        (r) => html`<tr key=${r.rollout_id}>
          <td class="wide"><${Link} to=${[store, "rollout", r.rollout_id]}><${TaskText} task=${r.task} /><//></td>
          <td data-label="step"><${Link} to=${stepPath(store, id, r.mode, r.step)}>${r.mode === "train" ? r.step + 1 : r.step}<//></td>
          <td data-label="reward"><${Reward} value=${r.reward} /></td>
          <td data-label="advantage"><${Advantage} value=${r.advantage} dropped=${r.dropped} /></td>
          <td data-label="agents">${r.agents.join(", ")}</td>
          <td data-label="error" class="bad">${r.error}</td>
        </tr>`,
      )}</tbody>
    </table></div>
    <p class="dim">${num(rollouts.length)} rollouts, the newest first</p>
    ${rest.error && html`<${Failure} error=${rest.error} />`}
    ${rest.next && html`<p><button type="button" onClick=${more}>Older ones</button></p>`}`;
}
