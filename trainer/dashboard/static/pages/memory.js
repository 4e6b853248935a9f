// What a run's agents remember: the newest entries, or those with a word that is searched.
import { html, useRef, useState } from "../vendor/preact-htm.js";
import { useData } from "../lib/api.js";
import { num } from "../lib/format.js";
import { Loaded } from "../lib/ui.js";

export function Memory({ store, run }) {
  const [text, setText] = useState("");
  const state = useData(`${store}/runs/${encodeURIComponent(run.run_id)}/memory?until=${run.step}${text && `&text=${encodeURIComponent(text)}`}`);
  const kept = useRef(null);
  const data = (kept.current = state.data || kept.current);
  if (!data) return state.error ? html`<${Loaded} state=${state} />` : null;
  if (data.total === 0) return null;
  const { entries, found, total } = data;
  return html`<section>
    <h2>memory</h2>
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <label>search <input type="search" maxlength="200" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
      <span class="dim">${text ? `${num(found)} of ${num(total)} entries` : `${num(total)} entries, the newest first`}${entries.length < found ? `; ${num(entries.length)} are shown` : ""}</span>
    </form>
    ${state.error && html`<${Loaded} state=${state} />`}
    ${entries.length > 0 &&
    html`<div class="scroll"><table class="memory">
      <thead><tr>
        <th scope="col">namespace</th><th scope="col">key</th><th scope="col">text</th>
        <th scope="col" class="right">reward</th><th scope="col" class="right">since step</th>
      </tr></thead>
      <tbody>
        ${entries.map(
          (entry) => html`<tr>
            <td>${entry.namespace.join(" / ") || html`<span class="dim">–</span>`}</td>
            <th scope="row">${entry.key}</th>
            <td class="task">${entry.text || JSON.stringify(entry.value)}</td>
            <td class="num right">${entry.reward === null ? html`<span class="dim">–</span>` : num(entry.reward)}</td>
            <td class="num right">${num(entry.since)}</td>
          </tr>`,
        )}
      </tbody>
    </table></div>`}
  </section>`;
}
