// What all pages share. Texts only ever become text nodes and attributes; the server has escaped control characters.
import { html, useEffect } from "../vendor/preact-htm.js";
import { setKey } from "./api.js";
import { num, oneLine, signed } from "./format.js";
import { href } from "./route.js";

export { html };

export function Link({ to, query, children, ...rest }) {
  return html`<a href=${href(to, query)} ...${rest}>${children}</a>`;
}

// The way back; Escape follows its last link.
export function Crumbs({ items, here }) {
  useEffect(() => {
    document.title = `${here} · agl`;
    scrollTo(0, 0);
  }, [here]);
  return html`<nav class="crumbs" aria-label="breadcrumbs">
    <${Link} to=${[]}>Runs<//>
    ${items.map(([label, to, query]) => html`<span aria-hidden="true">›</span><${Link} to=${to} query=${query}>${label}<//>`)}
    <span aria-hidden="true">›</span><span aria-current="page">${here}</span>
  </nav>`;
}

export function Failure({ error }) {
  if (error.status === 401) return html`<${KeyForm} />`;
  return html`<div class="failure" role="alert">
    <p><strong>${error.message}</strong></p>
    ${error.hint && html`<p>→ ${error.hint}</p>`}
    ${error.where &&
    html`<p class="dim">
      ${Object.entries(error.where)
        .map(([name, value]) => `${name} ${value}`)
        .join(" · ")}
    </p>`}
  </div>`;
}

function KeyForm() {
  function open(event) {
    event.preventDefault();
    setKey(event.target.elements.key.value.trim());
  }
  return html`<form class="card narrow" onSubmit=${open}>
    <h1>Enter the dashboard's key</h1>
    <p>Open the link that the command printed, or paste its key here. The key stays in this tab.</p>
    <label>Key <input name="key" type="password" autocomplete="off" required /></label>
    <button type="submit">Open</button>
  </form>`;
}

// The data's view, or what is in its place.
export function Loaded({ state, children }) {
  if (state.data) {
    return html`${state.error && html`<${Failure} error=${state.error} />`}${children(state.data)}`;
  }
  if (state.error) return html`<${Failure} error=${state.error} />`;
  return html`<p class="dim loading" role="status">Loading …</p>`;
}

const SILENT_SECONDS = 180;
export function statusOf(run) {
  if (run.status === "running" && Date.now() / 1000 - run.updated_at > SILENT_SECONDS) return "silent";
  return run.status;
}

const STATUS = {
  silent: ["warn", "no heartbeat for 3 min"],
  running: ["live", "running"],
  succeeded: ["good", "succeeded"],
  failed: ["bad", "failed"],
  stopped: ["warn", "stopped"],
};
export function Status({ of }) {
  const [kind, text] = STATUS[of] || ["", of];
  return html`<span class="status ${kind}">${text}</span>`;
}

export function Fact({ label, title, children }) {
  return html`<div class="fact" title=${title}><dt>${label}</dt><dd>${children}</dd></div>`;
}

// Advantages decide the colour: five steps each way, the same on every page, so that equal ones look alike everywhere.
export function advantageClass(value) {
  if (value === null || value === undefined) return "";
  const strength = [0.01, 0.1, 0.3, 1, 3].filter((edge) => Math.abs(value) >= edge).length;
  return strength === 0 ? "v0" : `${value < 0 ? "n" : "p"}${strength}`;
}

const DIVERGING = ["n5", "n3", "n1", "v0", "p1", "p3", "p5"];
export function Scale({ low = "less likely", high = "more likely", classes = DIVERGING, about, children }) {
  return html`<span class="scale" title=${about}>
    <span class="dim">${low}</span>${classes.map((c) => html`<i class=${c}></i>`)}<span class="dim">${high}</span>${children}
  </span>`;
}

export function Advantage({ value, dropped }) {
  if (dropped && (value === null || value === undefined || value === 0)) {
    return html`<span class="chip dropped" title="not trained">${dropped}</span>`;
  }
  if (value === null || value === undefined) return html`<span class="dim">–</span>`;
  return html`<span class="chip ${advantageClass(value)}">${signed(value)}</span>`;
}

export function Reward({ value }) {
  return value === null || value === undefined ? html`<span class="dim">none</span>` : html`<span class="num">${num(value)}</span>`;
}

export function TaskText({ task }) {
  return html`<span class="task">${oneLine(task)}</span>`;
}

export function Value({ value }) {
  return html`<pre class="value" tabindex="0">${typeof value === "string" ? value : JSON.stringify(value, null, 2)}</pre>`;
}

export function Switch({ label, options, value, onChange }) {
  return html`<div class="switch" role="group" aria-label=${label}>
    ${options.map(
      ([name, text]) =>
        html`<button type="button" aria-pressed=${name === value ? "true" : "false"} onClick=${() => onChange(name)}>${text}</button>`,
    )}
  </div>`;
}
