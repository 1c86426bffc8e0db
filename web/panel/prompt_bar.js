// Where the time of the last prompt went: a bar of its parts, and what is to be said of them.

import { hint, make, seconds } from "./elements.js";
import { t } from "./texts.js";

/** The bar; its `update` takes `last_prompt` of the status, or null. */
export function promptBar() {
  const bar = make("div", "cp-bar");
  bar.setAttribute("role", "img");
  const legend = make("div", "cp-legend");
  const said = make("p", "cp-activity");
  const element = make("div", "cp-prompt", null, bar, legend, said);
  hint(element, t("hint.prompt"));
  let shown = null;
  element.update = (prompt) => {
    element.hidden = !prompt;
    if (!prompt || JSON.stringify(prompt) === shown) return;
    shown = JSON.stringify(prompt);
    const parts = prompt.parts.filter((each) => each.seconds >= 0.005 * prompt.seconds);
    bar.replaceChildren(...parts.flatMap(segments));
    bar.setAttribute("aria-label", parts.map(nameOf).join(", "));
    legend.replaceChildren(...parts.map(entry));
    bar.hidden = legend.hidden = !prompt.parts.some((each) => each.part !== "other");
    const { cases, ...values } = prompt.sentence;
    const sentences = cases.map((each) => t(`prompt.${each}`, { ...values, unit: t(`unit.${values.unit}`) }));
    said.textContent = sentences.join(" ").replaceAll("。 ", "。");
    said.hidden = !said.textContent;
  };
  element.hidden = true;
  return element;
}

/** What several devices computed of a part comes first, in colour. */
function segments(part) {
  const [onAll, others] = [part.on_all, part.seconds - part.on_all];
  return [segment(part, onAll, "cp-on-all"), segment(part, others, "")].filter((each) => each.style.flexGrow > 0);
}

function segment(part, length, kind) {
  const element = make("span", `cp-segment cp-part-${part.part} ${kind}`.trim());
  element.style.flexGrow = length;
  element.title = nameOf(part);
  return element;
}

function entry(part) {
  const mark = make("span", `cp-segment cp-part-${part.part} ${part.on_all ? "cp-on-all" : ""}`.trim());
  return make("span", "cp-entry", null, mark, make("span", "", nameOf(part)));
}

function nameOf(part) {
  const values = { part: t(`part.${part.part}`), time: seconds(part.seconds), shared: seconds(part.on_all) };
  const all = part.on_all > 0.99 * part.seconds || !part.on_all;
  return t(all ? "prompt.part" : "prompt.on_all", values);
}
