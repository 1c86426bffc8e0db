// The error that ended a run: of which device, in which node, and what it says.

import { button, copyButton, make } from "./elements.js";
import { deviceName } from "./ranks.js";
import { t } from "./texts.js";

let dismissed = null; // the time of the error that need not be shown any more

/** The last error. Kept until it is dismissed or there is another, so that it can be read and selected while events come in. */
export function errorCard() {
  const title = make("strong");
  const text = make("pre");
  const copy = copyButton(text);
  const dismiss = button("pi-times", () => {
    dismissed = shown;
    card.hidden = true;
  });
  dismiss.say(t("dismiss"));
  text.tabIndex = 0; // it scrolls
  const card = make("div", "cp-error", null, title, text, make("div", "cp-buttons", null, copy, dismiss));
  card.setAttribute("role", "alert");
  let shown = null;
  card.update = (error) => {
    card.hidden = !error || error.time === dismissed;
    if (!error || error.time === shown) return;
    shown = error.time;
    title.textContent = titleOf(error);
    text.textContent = error.message;
    copy.say(t("copy"));
  };
  return card;
}

/** The last errors, of runs before good ones too, the newest first. Made anew only where there is another. */
export function pastErrors() {
  const list = make("div", "cp-lists");
  const element = make("details", "cp-past", null, make("summary", "", t("past_errors")), list);
  let newest = null;
  element.update = (errors) => {
    element.hidden = !errors.length;
    if (!errors.length || errors[0].time === newest) return;
    newest = errors[0].time;
    list.replaceChildren(...errors.map((error) => make("div", "cp-facts", null, make("strong", "", titleOf(error)), textOf(error))));
  };
  return element;
}

function textOf(error) {
  const text = make("pre", "", error.message);
  text.tabIndex = 0; // it scrolls
  return text;
}

function titleOf(error) {
  const parts = [new Date(error.time * 1000).toLocaleTimeString()];
  if (error.rank !== null) parts.push(deviceName(error.rank, error.device));
  if (error.node) parts.push(t("in_node", { node: error.node.type, id: error.node.id }));
  return t("error_title", { what: parts.join(", ") });
}
