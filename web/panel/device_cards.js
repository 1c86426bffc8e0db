// The devices before anything has run: what each is, how they reach each other, and a switch for each.

import { choice, foundDevices, gigabytes, switchDevice } from "../devices.js";
import { make, makeSwitch } from "./elements.js";
import { deviceName } from "./ranks.js";
import { t } from "./texts.js";

/** The cards; `update` takes the status. Folded away while there are workers, which tell more of themselves. */
export function deviceCards(prefer) {
  const summary = make("summary");
  const list = make("div", "cp-ranks");
  const note = make("p", "cp-note");
  const element = make("details", "cp-devices", null, summary, list, note);
  element.title = t("hint.devices");
  summary.title = element.title; // a screen reader reads the hint of what has the focus
  element.hidden = true;
  let found = null;
  let switches = [];
  let working = null; // whether there were workers
  let status = null;

  function show() {
    element.hidden = !found?.devices.length || !status;
    if (element.hidden) return;
    const { by, on } = choice(status.settings, found.devices);
    const used = status.alone ? found.devices.slice(0, 1).map((device) => device.name) : on;
    summary.textContent = t("devices.summary", { count: used.length, all: found.devices.length });
    for (const { name, input } of switches) {
      input.checked = used.includes(name);
      input.disabled = by === "fixed" || Boolean(status.alone) || used.join() === name;
    }
    note.textContent = [status.speed ? "" : hope(found, used), reach(found), t(`devices.by.${status.alone ? "one" : by}`)].filter(Boolean).join(" ");
  }

  async function look() {
    found = await foundDevices();
    switches = found.devices.map((device, at) => {
      const input = makeSwitch(async () => {
        await switchDevice(device.name, status.settings, found.devices, prefer);
        show();
      });
      return { name: device.name, input, card: card(device, at, input) };
    });
    list.replaceChildren(...switches.map((each) => each.card));
    show();
  }

  element.update = (now) => {
    if (now && !status) look();
    status = now;
    if (now && working !== (now.state !== "off")) {
      working = now.state !== "off";
      element.open = !working;
    }
    show();
  };
  return element;
}

function card(device, at, input) {
  const title = device.name.startsWith("cpu") ? t("devices.cpu") : device.title;
  const words = make("span", "cp-device", null, make("strong", "", deviceName(at, device.name)), make("span", "cp-name", title));
  const element = make("label", "cp-rank", null, input, words, make("span", "cp-memory", gigabytes(device.memory)));
  element.dataset.device = device.name;
  return element;
}

/** What to expect of those that are used, where they are alike. What was measured is told above. */
function hope({ devices, expected }, used) {
  const kinds = new Set(devices.filter(({ name }) => used.includes(name)).map(({ title }) => title));
  if (kinds.size !== 1 || !expected[used.length]) return "";
  const [low, high] = expected[used.length];
  return t("devices.expected", { count: used.length, low, high });
}

/** How they reach each other, or why there are none. */
function reach({ devices, indirect, reason }) {
  if (reason) return t(`alone.${reason.case}`, reason);
  if (indirect === null || devices.length < 2) return "";
  if (!indirect.length) return t("devices.direct");
  const names = indirect.map((pair) => pair.split(" to ").map((name) => deviceName(0, name)).sort().join(" – "));
  const pairs = [...new Set(names)];
  if (pairs.length === (devices.length * (devices.length - 1)) / 2) return t("devices.indirect");
  return t("devices.some_indirect", { pairs: pairs.join(", ") });
}
