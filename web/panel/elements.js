// What the panel is made of.

import { t } from "./texts.js";

/** Give an element a hint that a mouse, a key or a finger shows (`[data-hint]` in the style sheet), and that is read aloud. */
export function hint(element, text) {
  element.dataset.hint = element.title = text;
  element.setAttribute("aria-description", text);
  if (element.tabIndex < 0) element.tabIndex = 0;
  return element;
}

/** Make elements inside of another one anew, and put the focus where it was: on the one with the same `data-key`. */
export function renew(element, children) {
  const { key } = element.contains(document.activeElement) ? document.activeElement.dataset : {};
  element.replaceChildren(...children);
  if (key) element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

/** An element with text and children. Text is never parsed as HTML: errors hold what other programs wrote. */
export function make(tag, className, text, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined && text !== null) element.textContent = text;
  element.append(...children);
  return element;
}

export function button(icon, onClick) {
  const element = make("button", "cp-button", null, make("i", `pi ${icon}`), make("span"));
  element.type = "button";
  element.addEventListener("click", () => onClick(element));
  element.say = (text) => {
    element.lastChild.textContent = text;
  };
  return element;
}

/** A button that copies an element's text. */
export function copyButton(element) {
  const copy = button("pi-copy", async () => copy.say((await copyText(element.textContent)) ? t("copied") : t("not_copied")));
  copy.say(t("copy"));
  return copy;
}

/** The clipboard's own interface is there on https and localhost only; ComfyUI is often used over plain http. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", "", text);
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/** A switch; `switched` gets whether it is on. */
export function makeSwitch(switched) {
  const input = make("input", "cp-switch");
  input.type = "checkbox";
  input.setAttribute("role", "switch");
  input.addEventListener("change", () => switched(input.checked));
  return input;
}

/** A switch with a text beside it; its `set` says whether it is on. */
export function labelledSwitch(text, hint, switched) {
  const input = makeSwitch(switched);
  const element = make("label", "cp-rank", null, make("span", "", text), input);
  element.title = hint; // a screen reader reads that of what has the focus
  input.title = hint;
  element.set = (on) => {
    input.checked = on;
  };
  return element;
}

/** A line of a name and what it stands for. The hint says what can be done about it, and explains the words. */
export function fact(name, value, text, of = "") {
  const row = make("div", "cp-fact", null, make("span", "cp-name", name), make("span", "cp-value", value));
  row.dataset.key = `${of} ${name}`;
  return hint(row, text);
}

export function seconds(value) {
  return value < 0.1 ? `${(value * 1000).toFixed(1)} ms` : `${value.toPrecision(3)} s`;
}

export function gibibytes(value) {
  return `${(value / 2 ** 30).toFixed(2)} GiB`;
}
