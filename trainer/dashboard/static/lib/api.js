// Reads the JSON API. The key comes in the link's fragment and stays in this tab and in those opened from it.
import { useEffect, useRef, useState } from "../vendor/preact-htm.js";

const KEY = "agl-key";
const tabs = new BroadcastChannel("agl-key");

// The link is #key=KEY, or #key=KEY/route. The key is taken out of the address, so that a copied link has none.
function takeKey() {
  const match = /^#key=([^/]*)(\/.*)?$/.exec(location.hash);
  if (!match) return;
  sessionStorage.setItem(KEY, decodeURIComponent(match[1]));
  history.replaceState(null, "", `#${match[2] || "/"}`);
}
takeKey();
addEventListener("hashchange", takeKey, { capture: true });

// A tab that was opened by a middle click has no session storage of its own; tabs of this origin share the key.
tabs.onmessage = ({ data }) => {
  const key = sessionStorage.getItem(KEY);
  if (data.ask && key) tabs.postMessage({ key });
  else if (data.key && !key) {
    setKey(data.key);
  }
};
if (!sessionStorage.getItem(KEY)) tabs.postMessage({ ask: true });

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
  dispatchEvent(new Event("keychange"));
}

export class ApiError extends Error {
  constructor(status, { message, hint, where } = {}) {
    super(message || `the server answered ${status}`);
    this.status = status;
    this.hint = hint;
    this.where = where;
  }
}

// The answer of a path below api/. Raises ApiError.
export const get = (path, signal) => ask(path, { signal });

// Send a value to a path below api/, and have everything on the page read again. Raises ApiError.
export async function send(path, value) {
  const headers = { "content-type": "application/json" };
  const body = await ask(path, { method: "POST", headers, body: JSON.stringify(value) });
  dispatchEvent(new Event("written"));
  return body;
}

async function ask(path, { headers = {}, ...options }) {
  const key = sessionStorage.getItem(KEY);
  let response;
  try {
    response = await fetch(`api/${path}`, {
      headers: key ? { ...headers, authorization: `Bearer ${key}` } : headers,
      cache: "no-store",
      ...options,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "the server does not respond", hint: "is the command that printed the link still running?" });
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new ApiError(response.status, body.error);
  return body;
}

// {data, error, loading} of a path; null reads nothing. Read again every so many milliseconds, if `every` is set, but
// not while the page is hidden. What is shown stays until the new answer is there.
export function useData(path, { every = 0, read = get } = {}) {
  const [state, setState] = useState({ path: null, data: null, error: null });
  const [again, setAgain] = useState(0);
  const poll = useRef(every);
  poll.current = every;
  useEffect(() => {
    if (path === null) return undefined;
    const abort = new AbortController();
    let timer = 0;
    async function load() {
      timer = 0;
      try {
        // `read` may show a first part before it has all.
        const show = (data) => setState({ path, data, error: null });
        show(await read(path, abort.signal, show));
      } catch (error) {
        if (error.name === "AbortError") return;
        setState((old) => ({ path, data: old.path === path ? old.data : null, error }));
      }
      if (poll.current && !document.hidden && !abort.signal.aborted) timer = setTimeout(load, poll.current);
    }
    function visible() {
      if (!document.hidden && !timer && poll.current) load();
    }
    const retry = () => setAgain((n) => n + 1);
    load();
    document.addEventListener("visibilitychange", visible);
    addEventListener("keychange", retry);
    addEventListener("written", retry);
    return () => {
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", visible);
      removeEventListener("keychange", retry);
      removeEventListener("written", retry);
    };
  }, [path, again, Boolean(every)]);
  const current = state.path === path;
  return { data: current ? state.data : null, error: current ? state.error : null, loading: path !== null && !current };
}
