// The devices before anything has run: what each is, how they reach each other, and a switch for each.

import { aloneIn, choice, foundDevices, gigabytes, otherDevice, switchDevice } from "../devices.js";
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
  let own = []; // switches of this computer's devices
  let more = []; // those of others that are named
  let working = null; // whether there were workers
  let status = null;

  function show() {
    element.hidden = !found?.devices.length || !status;
    if (element.hidden) return;
    const { by, on, others, listed } = choice(status.settings, found.devices);
    const alone = Boolean(aloneIn(status));
    const used = alone ? found.devices.slice(0, 1).map((device) => device.name) : on;
    showMore(listed.map((name) => otherDevice(name, found.devices, status.hosts)));
    for (const { device, input } of own) {
      input.checked = used.includes(device.name);
      input.disabled = by === "fixed" || alone || used.join() === device.name;
    }
    for (const { device, input } of more) {
      input.checked = !alone && others.includes(device.name);
      input.disabled = by === "fixed";
    }
    const count = [...own, ...more].filter(({ input }) => input.checked).length;
    summary.textContent = t("devices.summary", { count, all: own.length + more.length });
    const apart = !alone && others.length > 0; // what is known of links is of this computer alone
    note.textContent = [reach(found, apart), t(`devices.by.${alone ? "one" : by}`)].filter(Boolean).join(" ");
  }

  function showMore(devices) {
    if (JSON.stringify(devices) === JSON.stringify(more.map(({ device }) => device))) return; // else the focus would be lost
    more.forEach((each) => each.card.remove());
    more = devices.map((device, at) => switchOf(device, own.length + at));
    list.append(...more.map((each) => each.card));
  }

  function switchOf(device, at) {
    const input = makeSwitch(async () => {
      await switchDevice(device.name, status.settings, found.devices, prefer);
      show();
    });
    return { device, input, card: card(device, at, input) };
  }

  async function look() {
    found = await foundDevices();
    own = found.devices.map(switchOf);
    list.replaceChildren(...own.map((each) => each.card));
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
  const title = device.name.startsWith("cpu") ? device.title || t("devices.cpu") : device.title || device.name;
  const words = make("span", "cp-device", null, make("strong", "", deviceName(at, device.name)), make("span", "cp-name", title));
  const element = make("label", "cp-rank", null, input, words, make("span", "cp-memory", gigabytes(device.memory)));
  element.dataset.device = device.name;
  return element;
}

/** How they reach each other, or why there are none. */
function reach({ devices, indirect, reason }, apart) {
  if (reason) return t(`alone.${reason.case}`, reason);
  if (apart || indirect === null || devices.length < 2) return "";
  if (!indirect.length) return t("devices.direct");
  const names = indirect.map((pair) => pair.split(" to ").map((name) => deviceName(0, name)).sort().join(" – "));
  const pairs = [...new Set(names)];
  if (pairs.length === (devices.length * (devices.length - 1)) / 2) return t("devices.indirect");
  return t("devices.some_indirect", { pairs: pairs.join(", ") });
}
