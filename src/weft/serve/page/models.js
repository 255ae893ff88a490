// The list of models.

import { el } from "./dom.js";

/**
 * Fills `select` with models, each followed by its adapters, and chooses `wanted` where it is served. Returns the chosen
 * model, and whether `wanted` is missing.
 */
export function fillModels(select, models, wanted) {
  const ids = new Set(models.map((model) => model.id));
  const option = (model, text) => el("option", { value: model.id }, text);
  const entries = [];
  for (const model of models) {
    if (model.parent && ids.has(model.parent)) continue;
    entries.push(option(model, model.id));
    for (const adapter of models) {
      if (adapter.parent === model.id) entries.push(option(adapter, `${model.id} + ${adapter.id}`));
    }
  }
  select.replaceChildren(...(entries.length ? entries : [el("option", { value: "" }, "no model")]));
  select.disabled = !entries.length;
  if (ids.has(wanted)) select.value = wanted;
  return { chosen: select.value, missing: Boolean(wanted) && !ids.has(wanted) };
}
