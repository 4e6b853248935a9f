// What a person notes: name, tags and text of a run, whether it is deleted or to stop, and the label of a rollout.
import { html, useState } from "../vendor/preact-htm.js";
import { send } from "../lib/api.js";
import { num } from "../lib/format.js";
import { Failure } from "../lib/ui.js";

// Sends, and keeps the error of the last attempt.
function useSend(path) {
  const [state, setState] = useState({ busy: false, error: null });
  async function post(value) {
    setState({ busy: true, error: null });
    try {
      await send(path, value);
      setState({ busy: false, error: null });
      return true;
    } catch (error) {
      setState({ busy: false, error });
      return false;
    }
  }
  return [post, state];
}

export const Tags = ({ tags }) => tags.map((tag) => html`<span class="chip tag">${tag}</span>`);

export function Noted({ store, run }) {
  const path = `${store}/runs/${encodeURIComponent(run.run_id)}`;
  const { tags, note, deleted_at: deletedAt } = run.about;
  const [editing, setEditing] = useState(false);
  const [post, { busy, error }] = useSend(`${path}/about`);
  const [stop, stopping] = useSend(`${path}/stop`);
  async function save(event) {
    event.preventDefault();
    const { name, tags: list, note: text } = event.target.elements;
    if (await post({ name: name.value.trim(), tags: list.value.split(","), note: text.value.trim() })) setEditing(false);
  }
  return html`<section class="noted">
    ${deletedAt !== null && html`<p class="failure">This run is deleted: lists leave it out.</p>`}
    <div class="bar-row">
      <${Tags} tags=${tags} />
      ${!editing && html`<button type="button" onClick=${() => setEditing(true)}>Name, tags, note</button>`}
      ${run.status === "running" &&
      html`<button type="button" disabled=${run.stopping || stopping.busy} title="the checkpoint is saved, and the run can be resumed" onClick=${() => stop({})}>
        ${run.stopping ? "Stops after this step" : "Stop after this step"}
      </button>`}
      <button type="button" disabled=${busy} onClick=${() => post({ deleted: deletedAt === null })}>${deletedAt === null ? "Delete" : "Restore"}</button>
    </div>
    ${note && !editing && html`<pre class="value" tabindex="0">${note}</pre>`}
    ${editing &&
    html`<form class="card narrow" onSubmit=${save}>
      <label>name <input name="name" value=${run.about.name} maxlength="4000" /></label>
      <label>tags <input name="tags" value=${tags.join(", ")} placeholder="separated by commas" maxlength="4000" /></label>
      <label>note <textarea name="note" rows="4" maxlength="4000">${note}</textarea></label>
      <div class="bar-row">
        <button type="submit" disabled=${busy}>Save</button>
        <button type="button" onClick=${() => setEditing(false)}>Cancel</button>
      </div>
    </form>`}
    ${(error || stopping.error) && html`<${Failure} error=${error || stopping.error} />`}
  </section>`;
}

export function Label({ store, rollout, rewards }) {
  const label = rewards.find((reward) => reward.source === "label" && reward.name === "label");
  const [post, { busy, error }] = useSend(`${store}/rollouts/${encodeURIComponent(rollout)}/label`);
  async function give(event) {
    event.preventDefault();
    const { value, note } = event.target.elements;
    await post({ value: Number(value.value), note: note.value.trim() });
  }
  return html`<form class="filters label" onSubmit=${give} aria-label="label of this rollout">
    <label>your label <input name="value" type="number" step="any" required value=${label ? label.value : ""} placeholder="1 = good, 0 = bad" /></label>
    <label>why <input name="note" value=${label?.explanation || ""} maxlength="4000" /></label>
    <button type="submit" disabled=${busy}>${label ? "Change" : "Label"}</button>
    ${label && html`<button type="button" disabled=${busy} onClick=${() => post({ value: null })}>Withdraw ${num(label.value)}</button>`}
    ${error && html`<${Failure} error=${error} />`}
  </form>`;
}
