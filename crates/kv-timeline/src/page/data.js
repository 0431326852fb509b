
"use strict";
// What the page is about: the data, and how its parts are named. Everything below is inside one function per file,
// joined by `page`.
const page = {};
window.addEventListener("error", (event) => {
  const place = document.getElementById("script-error");
  place.hidden = false;
  place.textContent = "The script of this page has failed: " + event.message;
});
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  // Events name their texts by place, because most texts are those of every request.
  data.requests.forEach((request) => request.lanes.forEach((lane) => lane.events.forEach((event) => { event[2] = data.texts[event[2]]; })));
  const phases = {
    Bootstrapping: ["--boot", "waits for its peer (lookup, handshake)"],
    WaitingForInput: ["--input", "waits for its scheduler to give pages"],
    Transferring: ["--transfer", "has its pages: bytes move, or wait to be read under a lease"],
    Closing: ["--closing", "has succeeded, tells its peer"],
    Failing: ["--failing", "has failed, tells its peer"],
    Quarantine: ["--quarantine", "has failed, pages still in reach of its peer"],
  };
  const kinds = {
    "failed": "--bad", "lease expired": "--lease", "peer lost": "--bad", "peer trouble": "--again",
    "peer back": "--ok", "asked again": "--again", "quarantine": "--quarantine",
  };

  const time = (micros) => {
    const size = Math.abs(micros);
    if (size >= 1e6) return (micros / 1e6).toFixed(3) + " s";
    if (size >= 1e3) return (micros / 1e3).toFixed(size < 1e4 ? 2 : 1) + " ms";
    return micros.toFixed(size < 10 ? 1 : 0) + " µs";
  };
  const millis = (micros) => (micros / 1e3).toFixed(3);
  const unit = (value, units, step) => {
    let at = 0;
    while (value >= step && at < units.length - 1) { value /= step; at += 1; }
    return (value < 10 && at > 0 ? value.toFixed(1) : value.toFixed(0)) + " " + units[at];
  };
  const bytes = (count) => unit(count, ["bytes", "KB", "MB", "GB", "TB"], 1000);
  const rate = (perSecond) => unit(perSecond, ["B/s", "KB/s", "MB/s", "GB/s", "TB/s"], 1000);
  const count = (number, word) => number + " " + word + (number === 1 ? "" : "s");

  // Names may turn the direction of what stands behind them in the same line.
  const plain = (text) => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, "");

  const worker = (at) => (at === null || at === undefined ? "" : data.workers[at].name);
  const unsure = (at) => {
    const record = at === null || at === undefined ? null : data.workers[at].record;
    return record ? record.unsure : null; // null: not known
  };
  // How far apart events of two workers may be in truth if they seem to be at the same time; null if that is not known.
  const unsureBetween = (a, b) => {
    if (a === b) return 0;
    const [left, right] = [unsure(a), unsure(b)];
    return left === null || right === null ? null : left + right;
  };

  const retriedBy = new Map();
  data.requests.forEach((request, at) => {
    request.at = at;
    if (request.retry_of !== null) retriedBy.set(request.retry_of, at);
  });
  data.requests.forEach((request) => {
    const lanes = request.lanes;
    request.retriedBy = retriedBy.get(request.at);
    request.failed = lanes.some((lane) => lane.outcome === "failed");
    request.again = request.retry_of !== null || request.retriedBy !== undefined || lanes.some((lane) => lane.repeats.length > 0);
    request.from = lanes.reduce((first, lane) => Math.min(first, lane.from), Infinity);
    request.to = lanes.reduce((last, lane) => Math.max(last, lane.to), -Infinity);
    request.name = (request.label ? request.label + " · " : "") + "room " + request.room;
    request.short = request.label || "room " + request.room;
    const names = lanes.flatMap((lane) => [worker(lane.worker), ...(lane.failure || [])]);
    const others = request.unrecorded.map(([at]) => worker(at));
    request.text = [request.name, ...names, ...others].join("\n").toLowerCase();
  });

  // Workers without a record, and when others first noticed that they are lost.
  const lost = new Map();
  data.incidents.forEach((incident) => {
    if (incident.kind === "peer lost" && incident.peer !== null && !lost.has(incident.peer)) lost.set(incident.peer, incident.at);
  });

  // Incidents of the same kind, of the same peer, one after the other, as one.
  const groups = [];
  const open = new Map();
  data.incidents.forEach((incident) => {
    if (incident.kind === "quarantine") return;
    const request = incident.request ? data.requests[incident.request[0]] : null;
    const lane = request ? request.lanes[incident.request[1]] : null;
    const name = incident.kind === "failed" && lane && lane.failure ? lane.failure[0] : incident.text.replace(/[\d.]+ ?(ns|µs|ms|s)\b/g, "…");
    const key = [incident.kind, name, incident.peer, incident.kind === "failed" ? incident.worker : ""].join("|");
    let group = open.get(key);
    if (!group) {
      group = { ...incident, to: incident.at, number: 0, requests: new Set(), workers: new Set(), lane };
      open.set(key, group);
      groups.push(group);
    }
    group.number += 1;
    group.to = incident.at;
    group.workers.add(incident.worker);
    if (incident.request) group.requests.add(incident.request[0]);
  });
  const sentence = (group) => {
    const by = [...group.workers].map(worker).join(", ");
    const peer = worker(group.peer);
    const requests = group.requests.size ? count(group.requests.size, "request") : "";
    const times = group.number > group.workers.size ? " (" + group.number + " times)" : "";
    switch (group.kind) {
      case "failed": return by + ": " + requests + " failed" + (peer ? " with " + peer : "") + ": " + (group.lane && group.lane.failure ? group.lane.failure[1] : group.text);
      case "lease expired": return by + ": the lease of " + requests + " has expired" + (peer ? " before " + peer + " had read the pages" : " before anybody read the pages");
      case "asked again": return by + ": " + group.text + (requests ? ", for " + requests : "") + times;
      default: {
        if (!peer) return by + ": " + group.text + times;
        const text = group.text.replace("the way to the peer", "the way to it");
        return peer + (text.startsWith("the peer ") ? text.slice("the peer".length) : ": " + text) + times + ", noticed by " + by;
      }
    }
  };
  data.requests.filter((request) => request.retry_of !== null).forEach((request) => {
    const first = data.requests[request.retry_of];
    const text = first.short + " is sent again as " + request.short;
    groups.push({ kind: "asked again", at: request.from, to: request.from, requests: new Set([request.at, first.at]), text, again: true });
  });
  groups.sort((a, b) => a.at - b.at);
  // Many requests that are sent again are one line.
  const again = groups.filter((group) => group.again);
  if (again.length > 3) {
    again[0].text = again.length + " requests are sent again, in new rooms";
    again[0].requests = new Set(again.flatMap((group) => [...group.requests]));
    again[0].to = again[again.length - 1].at;
  }
  const shown = groups.filter((group) => !group.again || again.length <= 3 || group === again[0]);
  shown.forEach((group) => { group.sentence = plain(group.again ? group.text : sentence(group)); });

  const style = () => {
    const all = getComputedStyle(document.documentElement);
    const cache = {};
    return (name) => (cache[name] ||= all.getPropertyValue(name).trim());
  };
  const all = { data, phases, kinds, time, millis, bytes, rate, count, worker, unsure, unsureBetween, plain, lost, groups: shown, style };
  Object.assign(page, all);
})();
