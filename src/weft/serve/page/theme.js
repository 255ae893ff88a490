// Dark, light, or as the system says. This script is not a module: it runs before the page is drawn for the first time.
"use strict";
(() => {
  const KEY = "weft.theme";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  try {
    const kept = localStorage.getItem(KEY);
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch {
    // No storage: the system's choice.
  }
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => {
      button.setAttribute("aria-label", isDark() ? "Light colors" : "Dark colors");
      button.title = button.getAttribute("aria-label");
    };
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      name();
      try {
        // The system's choice is not kept, so that the page follows it when it changes.
        if (isDark() === dark.matches) localStorage.removeItem(KEY);
        else localStorage.setItem(KEY, root.dataset.theme);
      } catch {
        // No storage: until the page is closed.
      }
      if (isDark() === dark.matches) delete root.dataset.theme;
    });
    dark.addEventListener("change", name);
    name();
  });
})();
