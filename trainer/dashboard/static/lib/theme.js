// Dark, light, or as the system has it. Runs before the first paint, so that nothing flashes; hence no module.
(() => {
  const KEY = "agl-theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");

  function apply() {
    const chosen = localStorage.getItem(KEY);
    root.dataset.theme = chosen || (system.matches ? "dark" : "light");
    dispatchEvent(new Event("themechange"));
  }

  globalThis.aglTheme = {
    toggle() {
      const next = root.dataset.theme === "dark" ? "light" : "dark";
      // The system's own choice is not kept, so that the page follows it again.
      if (next === (system.matches ? "dark" : "light")) localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, next);
      apply();
    },
  };
  system.addEventListener("change", apply);
  apply();
})();
