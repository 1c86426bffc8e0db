// What stands behind the panel's few words, for those who open it: how a call was split, what it took, what each rank holds.

import { fact, gibibytes, hint, make, seconds } from "./elements.js";
import { deviceName } from "./ranks.js";
import { spoken, t } from "./texts.js";

/** Details of a status: a list about all ranks, and one for each. */
export function details(now) {
  return [ofAll(now), ...now.ranks.map(ofRank)];
}

function ofAll(now) {
  const workers = [t("ranks", { count: now.world_size })];
  if (now.backend) workers.push(now.backend);
  if (now.peer_to_peer === false) workers.push(t("no_peer_to_peer"));
  const own = (message) => spoken({ message, translations: now.translations[message] });
  const text = [t("hint.workers"), own(now.fallback)].join("\n").trim();
  const list = make("div", "cp-facts", null, fact(t("fact.workers"), workers.join(", "), text));
  const models = Object.entries(now.weights); // "sharded: 64 GB of weights as 2 × 35 GB of 48 GB", by file
  const names = models.map(([model, reason]) => `${model} (${t(`weights.${reason.match(/^\w+/)[0]}`)})`);
  const reasons = models.map(([, reason]) => own(reason));
  if (models.length) list.append(fact(t("fact.models"), names.join(", "), [t("hint.models"), ...reasons].join("\n")));
  if (now.last_call) list.append(...ofSampler(now, now.last_call));
  if (now.last_vae_call) list.append(ofPictures(now, now.last_vae_call, t("fact.vae"), t("hint.vae")));
  if (now.last_upscale_call) list.append(ofPictures(now, now.last_upscale_call, t("fact.upscale"), t("hint.upscale")));
  return list;
}

/** Lines about the calls of the last sampling run. */
function ofSampler(now, call) {
  const mesh = [t("hint.mesh")];
  if (call.choice) mesh.push(call.choice);
  const [together, alone] = [now.speed?.seconds_per_call, now.speed?.seconds_per_call_on_one_device];
  const apart = now.speed?.difference_from_one_device;
  const ofAlone = [t("hint.alone")];
  if (apart != null) ofAlone.push(t("hint.differs", { percent: (apart * 100).toPrecision(2) }));
  const between = together ? t("hint.call_between") : t("hint.call_last");
  return [
    fact(t("fact.mesh"), meshOf(now, call), mesh.join("\n")),
    fact(t("fact.call"), seconds(together ?? call.seconds), between),
    fact(t("fact.alone"), alone ? seconds(alone) : t("not_measured"), ofAlone.join("\n")),
    fact(t("fact.waiting"), percent(call.waiting_share), t("hint.waiting")),
  ];
}

/** The last call of a VAE or an upscale model, in a line of its own: its seconds are none of the sampler's. */
function ofPictures(now, call, name, text) {
  const values = { mesh: meshOf(now, call), time: seconds(call.seconds), share: percent(call.waiting_share) };
  return fact(name, t("pictures_call", values), text);
}

function meshOf(now, call) {
  const axes = Object.entries(call.degrees).filter(([, degree]) => degree > 1);
  const mesh = axes.map(([axis, degree]) => `${axis} ${degree}`).join(" × ") || t("one_rank");
  const all = now.world_size;
  return call.at_work < all ? t("mesh_of_some", { mesh, count: call.at_work, all }) : mesh;
}

function percent(share) {
  return `${(share * 100).toFixed(0)} %`;
}

function ofRank(rank) {
  const memory = [t("memory.host", { size: gibibytes(rank.memory.host) })];
  if (rank.memory.device) memory.push(t("memory.device", { size: gibibytes(rank.memory.device) }));
  const title = make("strong", "", t("rank_title", { device: deviceName(rank.rank, rank.device), rank: rank.rank }));
  hint(title, t("hint.rank", { rank: rank.rank, device: rank.device })).dataset.key = `rank ${rank.rank}`;
  const list = make("div", "cp-facts", null, title, fact(t("fact.memory"), memory.join(", "), t("hint.memory"), rank.rank));
  const tokens = Object.entries(rank.tokens).map(([stream, count]) => `${count} ${stream}`);
  if (tokens.length) list.append(fact(t("fact.tokens"), tokens.join(", "), t("hint.tokens"), rank.rank));
  list.append(fact(t("fact.process"), String(rank.pid), t("hint.process"), rank.rank));
  list.dataset.detailsOf = rank.rank;
  return list;
}
