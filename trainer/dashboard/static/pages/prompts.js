// The candidates of a prompt search: scores, what each was rewritten from, and what changed in its texts.
import { html, useRef, useState } from "../vendor/preact-htm.js";
import { useData } from "../lib/api.js";
import { num } from "../lib/format.js";
import { href, stepPath } from "../lib/route.js";
import { Loaded, Switch } from "../lib/ui.js";

const LATEST = 30;

export function Prompts({ store, run }) {
  const path = `${store}/runs/${encodeURIComponent(run.run_id)}/prompts`;
  const state = useData(`${path}?until=${run.step}`);
  const [picked, setPicked] = useState(null);
  const [against, setAgainst] = useState("parent");
  const [all, setAll] = useState(false);
  const kept = useRef([]);
  const found = (kept.current = state.data?.candidates || kept.current);
  if (found.length === 0) return state.error ? html`<${Loaded} state=${state} />` : null;
  const best = found.find((c) => c.chosen) || leader(found);
  const one = found[picked ?? best.number];
  const other = against === "parent" ? (one.parent ?? 0) : 0;
  const shown = all ? found : found.filter((c) => c.number === 0 || c === best || c === one || c.number >= found.length - LATEST);
  return html`<section>
    <h2>prompts</h2>
    <div class="scroll"><table>
      <thead><tr>
        <th scope="col">candidate</th><th scope="col">rewritten from</th>
        <th scope="col" class="right">training tasks</th><th scope="col" class="right">validation</th><th scope="col" class="right">held-out</th>
      </tr></thead>
      <tbody>
        ${shown.map(
          (c) => html`<tr class=${c === one ? "here" : ""}>
            <th scope="row" style=${{ paddingLeft: `${8 + 14 * Math.min(c.depth, 12)}px` }}>
              <button class="link" aria-pressed=${c === one} onClick=${() => setPicked(c.number)}>${c.number}</button>
              ${c.number === 0 ? html` <span class="dim">start</span>` : ""}${c.chosen ? html` <b class="good">result</b>` : c === best ? html` <span class="dim">best so far</span>` : ""}
            </th>
            <td class="num">${c.parent ?? html`<span class="dim">${c.number === 0 ? "–" : "several"}</span>`}</td>
            ${["train", "val", "held_out"].map((split) => html`<td class="num right"><${Score} ...${{ store, run, of: last(c, split) }} /></td>`)}
          </tr>`,
        )}
      </tbody>
    </table></div>
    ${shown.length < found.length && html`<p><button class="link" onClick=${() => setAll(true)}>all ${num(found.length)} candidates</button></p>`}
    <div class="picks">
      <b>candidate ${one.number}</b>
      ${one.number > 0 && html`<span class="dim">compared with</span><${Switch} label="compared with" options=${[["parent", one.parent === null ? "start" : `candidate ${one.parent}`], ["start", "start"], ["none", "nothing"]].filter(([kind]) => kind !== "start" || one.parent)} value=${against} onChange=${setAgainst} />`}
    </div>
    <${Texts} path=${`${path}?candidate=${one.number}&against=${against === "none" ? one.number : other}`} />
  </section>`;
}

function Texts({ path }) {
  const read = useData(path);
  // The text before stays until the next one is there.
  const kept = useRef(null);
  kept.current = read.data || kept.current;
  const state = { ...read, data: kept.current };
  return html`<${Loaded} state=${state}>${(data) =>
    Object.entries(data.changes || {}).map(
      ([name, parts]) => html`<figure class="prompt">
        <figcaption>${name}${parts.every(([kind]) => kind === "same") && data.against !== data.candidate ? html` <span class="dim">unchanged</span>` : ""}</figcaption>
        <pre>${parts.map(([kind, text]) => (kind === "added" ? html`<ins>${text}</ins>` : kind === "removed" ? html`<del>${text}</del>` : text))}</pre>
      </figure>`,
    )}<//>`;
}

// A score with its interval, which leads to the rollouts.
function Score({ store, run, of }) {
  if (!of) return html`<span class="dim">–</span>`;
  const mode = of.split === "train" ? "train" : "val";
  return html`<a class="lined" href=${href(stepPath(store, run.run_id, mode, mode === "train" ? of.step - 1 : of.step))} title="${num(of.tasks)} tasks, step ${num(of.step)}">${num(of.score)}</a>
    <span class="dim"> [${num(of.low)}, ${num(of.high)}]</span>`;
}

// The evaluation on the most tasks of a split, of several the newest.
function last(candidate, split) {
  return candidate.evaluations.filter((e) => e.split.startsWith(split)).reduce((a, b) => (a && a.tasks > b.tasks ? a : b), null);
}

function leader(found) {
  const most = Math.max(...found.map((c) => last(c, "val")?.tasks ?? 0));
  const score = (c) => (last(c, "val")?.tasks === most ? last(c, "val").score : -Infinity);
  return found.reduce((a, b) => (score(b) > score(a) ? b : a));
}
