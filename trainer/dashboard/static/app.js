// The page: its frame, and which part of it the address names.
import { html, render, useEffect, useErrorBoundary } from "./vendor/preact-htm.js";
import { Compare } from "./pages/compare.js";
import { Group } from "./pages/group.js";
import { Recorded } from "./pages/recorded.js";
import { Rollout } from "./pages/rollout.js";
import { Run } from "./pages/run.js";
import { Runners } from "./pages/runners.js";
import { Runs } from "./pages/runs.js";
import { Search } from "./pages/search.js";
import { Step } from "./pages/step.js";
import { Link } from "./lib/ui.js";
import { useRoute } from "./lib/route.js";

function page({ parts, query }) {
  const [store, kind, id, mode, step] = parts;
  if (parts.length === 0) return html`<${Runs} query=${query} />`;
  if (store === "compare") return html`<${Compare} query=${query} />`;
  if (/^\d+$/.test(store)) {
    if (kind === "run" && id && !mode) return html`<${Run} store=${store} id=${id} key=${parts.join()} />`;
    if (kind === "run" && mode === "search") return html`<${Search} store=${store} id=${id} query=${query} />`;
    if (kind === "run" && /^\d+$/.test(step)) {
      return html`<${Step} store=${store} id=${id} mode=${mode} step=${Number(step)} query=${query} key=${parts.join()} />`;
    }
    if (kind === "group" && id) return html`<${Group} store=${store} id=${id} query=${query} key=${parts.join()} />`;
    if (kind === "rollout" && id) return html`<${Rollout} store=${store} id=${id} query=${query} key=${parts.join()} />`;
    if (kind === "runners") return html`<${Runners} store=${store} />`;
    if (kind === "recorded") return html`<${Recorded} store=${store} />`;
  }
  return html`<h1>Page not found</h1><p><${Link} to=${[]}>All runs<//></p>`;
}

function Guarded({ children }) {
  const [error, reset] = useErrorBoundary();
  useEffect(() => {
    if (!error) return undefined;
    console.error(error);
    addEventListener("hashchange", reset, { once: true });
    return () => removeEventListener("hashchange", reset);
  }, [error]);
  if (error) return html`<div class="failure" role="alert"><p><strong>This page failed: ${String(error.message)}</strong></p></div>`;
  return children;
}

function App() {
  const route = useRoute();
  useEffect(() => {
    function keys(event) {
      if (event.key !== "Escape" || event.defaultPrevented) return;
      const up = document.querySelectorAll(".crumbs a");
      if (up.length > 0) up[up.length - 1].click();
    }
    addEventListener("keydown", keys);
    return () => removeEventListener("keydown", keys);
  }, []);
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <header>
      <a class="brand" href="#/"><img src="static/icon.svg" alt="" width="22" height="22" />agl</a>
      <nav aria-label="main"><a href="#/">Runs</a></nav>
      <button type="button" class="quiet" onClick=${() => globalThis.aglTheme.toggle()} title="dark or light">
        <span aria-hidden="true">◐</span><span class="unseen">dark or light</span>
      </button>
    </header>
    <main id="main" tabindex="-1"><${Guarded}>${page(route)}<//></main>
  `;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

render(html`<${App} />`, document.getElementById("app"));
