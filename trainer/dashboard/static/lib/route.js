// The page's state is in the address: #/0/run/RUN/train/12?agent=solver. Every view can be linked to.
import { useEffect, useState } from "../vendor/preact-htm.js";

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#/, "").split("?", 2);
  let parts;
  try {
    parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    parts = ["unreadable"];
  }
  return { parts, query: Object.fromEntries(new URLSearchParams(query)) };
}

export function href(parts, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return parse(hash);
}

// Change the query without a step in the history: filters, colours.
export function setQuery(changes) {
  const { parts, query } = parse(location.hash);
  history.replaceState(null, "", href(parts, { ...query, ...changes }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export const runPath = (store, run) => [store, "run", run];
// Training counts steps from 0, and the curves count completed ones; people read the latter.
export const stepPath = (store, run, mode, step) => [store, "run", run, mode, mode === "train" ? step + 1 : step];
export const storedStep = (mode, shown) => (mode === "train" ? shown - 1 : shown);
