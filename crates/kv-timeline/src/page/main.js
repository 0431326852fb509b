
(() => {
  const { data, phases, kinds, time, millis, bytes, rate, count, worker, unsureBetween, groups, view, box, canvas, AXIS } = page;
  const by = (id) => document.getElementById(id);
  const make = (name, text, className) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  const cells = (row, texts) => {
    texts.forEach((text) => {
      const [content, className] = Array.isArray(text) ? text : [text];
      row.append(make("td", content, className));
    });
    return row;
  };

  // The workers of the other side, with the transport by which each was reached.
  const reached = (lane) => lane.peers.map((peer, at) => worker(peer) + (lane.transports[at] ? " by " + lane.transports[at] : "")).join(", ");

  // ---- what is said above the picture
  const failed = data.requests.filter((request) => request.failed);
  const again = data.requests.filter((request) => request.retriedBy !== undefined || request.lanes.some((lane) => lane.repeats.length > 0));
  const moved = data.requests.reduce((sum, request) => sum + request.lanes.reduce((all, lane) => all + lane.bytes, 0), 0);
  const silent = data.workers.filter((one) => !one.record).length;
  by("summary").textContent = [
    count(data.requests.length, "request"), failed.length + " failed", again.length + " sent again", bytes(moved) + " moved",
    time(data.end), count(data.workers.length, "worker") + (silent ? " (" + silent + " without a record)" : ""),
  ].join(" · ");
  data.remarks.forEach((remark) => by("remarks").append(make("li", remark)));
  const MOST = 14;
  groups.slice(0, MOST).forEach((group) => {
    const line = make("li");
    const dot = make("span", "", "dot");
    dot.style.background = "var(" + kinds[group.kind] + ")";
    const button = make("button", group.sentence);
    button.addEventListener("click", () => show(group));
    line.append(make("span", time(group.at), "at"), dot, button);
    by("incidents").append(line);
  });
  if (groups.length > MOST) by("incidents").append(make("li", "… and " + (groups.length - MOST) + " more: see the tables below"));
  if (!groups.length) by("incidents").append(make("li", "Nothing: every session has succeeded, and no peer was lost."));

  // ---- tools and legends
  const key = (name, text, line) => {
    const item = make("span", undefined, "key");
    const sample = make("i", "", line ? "line" : "");
    sample.style.background = "var(" + name + ")";
    item.append(sample, text);
    return item;
  };
  const sign = (letter, name, text) => {
    const item = make("span", undefined, "key");
    const sample = make("b", letter);
    sample.style.color = "var(" + name + ")";
    item.append(sample, text);
    return item;
  };
  for (const [phase, [name, text]] of Object.entries(phases)) by("legend").append(key(name, phase + ": " + text));
  by("legend").append(key("--post", "data operation"), key("--lease", "lease", true), sign("❘", "--lease", "heartbeat"), sign("◆", "--lease", "lease expired"),
    sign("✗", "--bad", "failed, or lost"), sign("▼", "--again", "registration sent again"), sign("request", "--again", "in the place of another one"), sign("┈", "--ghost", "a side without a record, as the other side heard of it"), sign("⊢⊣", "--soft", "uncertainty of a clock"));
  page.series.forEach((one, index) => {
    const item = key("--post", one.name + ": " + bytes(one.bytes));
    item.firstChild.style.background = page.hue(index);
    by("rates-legend").append(item);
  });

  let which = "all";
  const chips = [["all", "all"], ["failed", "failed"], ["again", "sent again"]].map(([name, text]) => {
    const chip = make("button", text);
    chip.addEventListener("click", () => { which = name; choose(); });
    by("chips").append(chip);
    return [name, chip];
  });
  const choose = () => {
    const text = by("filter").value.trim().toLowerCase();
    const requests = data.requests.filter((request) => (which === "all" || request[which]) && (!text || request.text.includes(text)));
    chips.forEach(([name, chip]) => chip.setAttribute("aria-pressed", String(name === which)));
    by("shown").textContent = requests.length + " of " + data.requests.length + " shown";
    page.layOut(requests);
  };
  by("filter").addEventListener("input", choose);

  // ---- zoom and pan
  const LEAST = 5; // microseconds
  const zoomTo = (from, to) => {
    const width = Math.max(to - from, LEAST);
    const margin = Math.max(data.end, LEAST) * 0.02;
    const most = Math.max(data.end, LEAST) + 2 * margin;
    const wide = Math.min(width, most);
    view.from = Math.min(Math.max(from, -margin), Math.max(-margin, data.end + margin - wide));
    view.to = view.from + wide;
    page.ask();
  };
  const zoom = (factor, around) => {
    const middle = around ?? (view.from + view.to) / 2;
    zoomTo(middle - (middle - view.from) * factor, middle + (view.to - middle) * factor);
  };
  const everything = () => zoomTo(-data.end * 0.01, data.end * 1.02);
  const span = (from, to) => { const margin = Math.max((to - from) * 0.15, 20); zoomTo(from - margin, to + margin); };
  const scrollTo = (request) => {
    const row = view.rows.find((one) => one.request === request);
    if (row) box.scrollTop = Math.max(0, row.y - box.clientHeight / 3);
  };
  const show = (group) => {
    const requests = [...group.requests].map((index) => data.requests[index]);
    const [from, to] = requests.length
      ? [requests.reduce((first, one) => Math.min(first, one.from), Infinity), requests.reduce((last, one) => Math.max(last, one.to), -Infinity)]
      : [group.at - 2e4, group.to + 2e4];
    span(from, to);
    if (requests.length) { which = "all"; by("filter").value = ""; choose(); detail(requests[0]); scrollTo(requests[0]); }
    by("picture").scrollIntoView({ block: "start" });
  };
  by("zoom-in").addEventListener("click", () => zoom(0.6));
  by("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
  by("fit").addEventListener("click", everything);
  box.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey || event.altKey) {
      zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) / 300), page.at(event.clientX - box.getBoundingClientRect().left));
    } else if (Math.abs(sideways) > 0 && (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) {
      const by = sideways / page.scale();
      zoomTo(view.from + by, view.to + by);
    } else return;
    event.preventDefault();
  }, { passive: false });
  box.addEventListener("keydown", (event) => {
    const step = (view.to - view.from) / 8;
    const does = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": everything,
      ArrowLeft: () => zoomTo(view.from - step, view.to - step), ArrowRight: () => zoomTo(view.from + step, view.to + step) }[event.key];
    if (does && !event.ctrlKey && !event.metaKey) { does(); event.preventDefault(); }
  });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, top: box.scrollTop, far: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return hover(event);
    const by = (drag.x - event.clientX) / page.scale();
    drag.far ||= Math.abs(event.clientX - drag.x) + Math.abs(event.clientY - drag.y) > 4;
    if (drag.far) { zoomTo(drag.from + by, drag.to + by); box.scrollTop = drag.top + drag.y - event.clientY; }
  });
  canvas.addEventListener("pointerup", (event) => {
    const clicked = drag && !drag.far;
    drag = null;
    const row = rowAt(event);
    if (clicked && row && row.request) detail(row.request);
  });
  canvas.addEventListener("pointerleave", () => { by("tip").hidden = true; view.hover = null; page.ask(); });
  canvas.addEventListener("dblclick", (event) => {
    const row = rowAt(event);
    if (row && row.request) span(row.request.from, row.request.to); else everything();
  });
  box.addEventListener("scroll", page.ask);
  new ResizeObserver(page.resize).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", page.recolor);

  // ---- hover
  const rowAt = (event) => {
    const y = event.clientY - box.getBoundingClientRect().top - AXIS + box.scrollTop;
    return page.visible().find((row) => y >= row.y && y < row.y + row.height) || null;
  };
  const near = (px, micros) => Math.abs(page.x(micros) - px) <= 4;
  const lines = (row, px) => {
    const now = page.at(px);
    if (row.kind === "worker") {
      const one = data.workers[row.worker];
      const marks = data.incidents.filter((incident) => !incident.request && incident.worker === row.worker && near(px, incident.at));
      const beats = one.record ? one.record.beats.filter(([when]) => near(px, when)) : [];
      return [one.name + ", incarnation " + one.life,
        one.record ? [] : ["This worker has handed in no record: it was killed, or did not answer. What others heard of it is in their lanes."],
        marks.map((mark) => time(mark.at) + "  " + worker(mark.peer) + ": " + mark.text),
        beats.slice(0, 3).map(([when, peer, heard, leases]) => time(when) + "  heartbeat " + (heard ? "of " : "to ") + worker(peer) + (leases ? ", for " + count(leases, "lease") : ""))];
    }
    if (row.kind === "ghost") return [row.request.name, ["The side of " + worker(row.worker) + " is not recorded: this is from when until when the other side heard of it."]];
    const lane = row.lane;
    const phase = lane.spans.find(([, from, to]) => now >= from && now <= to);
    const posts = lane.posts.filter(([from, to]) => px >= page.x(from) - 2 && px <= page.x(to === null ? lane.to : to) + 2);
    const events = lane.events.filter(([when]) => near(px, when));
    const off = page.unsure(lane.worker);
    return [row.request.name + ": " + worker(lane.worker) + (lane.sends ? " sends to " : " receives from ") + (reached(lane) || "nobody yet"),
      [count(lane.pages, "page") + ", " + bytes(lane.bytes) + " moved here" + (off === null ? "; the clock of this worker is not known" : off > 0 ? "; times ± " + time(off) : "")],
      phase ? [phase[0] + " for " + time(phase[2] - phase[1]) + ": " + phases[phase[0]][1]] : [],
      posts.slice(0, 3).map(([from, to, size, peer, write, error]) => (write ? "WRITE to " : "READ from ") + worker(peer) + ", " + bytes(size) + (error ? " failed: " + error : to === null ? ", end not recorded" : " in " + time(to - from) + (to > from ? ", " + rate((size / (to - from)) * 1e6) : ""))),
      events.slice(0, 8).map(([when, , text]) => time(when) + "  " + text),
      events.length > 8 ? ["… and " + (events.length - 8) + " more"] : [],
      lane.failure ? ["!failed: " + lane.failure[1]] : []];
  };
  const hover = (event) => {
    const row = rowAt(event);
    const tip = by("tip");
    if (view.hover !== row) { view.hover = row; page.ask(); }
    tip.hidden = !row;
    if (!row) return;
    const [title, ...more] = lines(row, event.clientX - box.getBoundingClientRect().left);
    tip.replaceChildren(make("b", page.plain(title)), ...more.flat().map((text) => make("div", page.plain(text).replace(/^!/, ""), text.startsWith("!") ? "bad" : "")));
    const width = Math.min(480, tip.offsetWidth);
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
    tip.style.top = (event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18) + "px";
  };

  // ---- one request: the events of all sides in one list
  const MOST_EVENTS = 2000;
  const detail = (request) => {
    view.chosen = request;
    page.ask();
    by("detail").hidden = false;
    by("detail-title").textContent = request.name;
    const notes = request.lanes.map((lane) => worker(lane.worker) + (lane.peers.length ? (lane.sends ? ", which sends to " : ", which receives from ") + reached(lane) + "," : "") + (lane.outcome === "ok" ? " has succeeded" : lane.outcome === "failed" ? " has failed: " + lane.failure[1] : ": still open when the record ends"));
    request.unrecorded.forEach(([index]) => notes.push(worker(index) + " has no record, so that its side is not shown"));
    if (request.retry_of !== null) notes.push("in the place of " + data.requests[request.retry_of].name);
    if (request.retriedBy !== undefined) notes.push("sent again as " + data.requests[request.retriedBy].name);
    by("detail-note").textContent = page.plain(notes.join("; ")) + ".";
    const events = request.lanes.flatMap((lane, place) => lane.events.map(([when, , text]) => ({ when, text, place, worker: lane.worker })));
    events.sort((a, b) => a.when - b.when);
    const body = by("detail-events").tBodies[0];
    body.replaceChildren();
    events.slice(0, MOST_EVENTS).forEach((event, index) => {
      const before = events[index - 1];
      let gap = "";
      if (before) {
        const off = unsureBetween(before.worker, event.worker);
        const apart = event.when - before.when;
        gap = off === null ? "≈ order not known: no common clock" : off > 0 && apart <= off ? "≈ order not known: ± " + time(off) : apart === 0 ? "at once" : "+ " + time(apart) + (off > 0 ? " ± " + time(off) : "");
      }
      const failure = /^(failed|the lease has expired|post .* failed)/.test(event.text);
      const row = cells(make("tr", undefined, event.place ? "other-side" : ""), [[millis(event.when), "num"], [gap, "soft"], worker(event.worker), [event.text, failure ? "bad" : ""]]);
      body.append(row);
    });
    if (events.length > MOST_EVENTS) body.append(cells(make("tr"), ["", "", "", "… and " + (events.length - MOST_EVENTS) + " more"]));
  };

  // ---- tables
  const failures = by("failures").tBodies[0];
  const MOST_ROWS = 2000;
  let rows = 0;
  data.requests.forEach((request) => request.lanes.forEach((lane) => {
    if (!lane.failure || (rows += 1) > MOST_ROWS) return;
    const end = lane.events.find(([, , text]) => text.startsWith("failed: "));
    const [name, why, advice, phase] = lane.failure;
    const row = make("tr", undefined, "go");
    cells(row, [[millis(end ? end[0] : lane.to), "num"], request.name, worker(lane.worker) + (lane.sends ? " (sends)" : " (receives)"), lane.peers.map(worker).join(", "), phase, [name + ": " + why, "bad"], advice]);
    row.addEventListener("click", () => { span(request.from, request.to); detail(request); scrollTo(request); });
    failures.append(row);
  }));
  if (rows > MOST_ROWS) failures.append(cells(make("tr"), ["", "… and " + (rows - MOST_ROWS) + " more"]));
  if (!rows) failures.append(cells(make("tr"), ["", "none"]));
  data.workers.forEach((one) => {
    const { record } = one;
    const row = make("tr");
    if (!record) {
      cells(row, [one.name, one.life, ["no record: the worker was killed, or did not answer", "bad"], "", "", "", ""]);
    } else {
      const { lost } = record;
      const clock = record.through !== null ? "shifted by " + time(record.shift) + ", through " + worker(record.through) : record.unsure === 0 ? "the clock of this page" : "not known: begins where the page begins";
      const unsure = record.unsure === null ? "not known" : record.unsure === 0 ? "" : "± " + time(record.unsure) + (record.contradicted ? " (messages contradict one another: a clock was set)" : "");
      const missing = [lost.sessions && count(lost.sessions, "session"), lost.session_events && count(lost.session_events, "event") + " of sessions", lost.other_events && count(lost.other_events, "other event"), lost.missed && count(lost.missed, "event") + " that came too fast"].filter(Boolean).join(", ");
      cells(row, [one.name, one.life, clock, unsure, [String(record.messages), "num"], [String(record.events), "num"], missing || "nothing"]);
    }
    by("workers").tBodies[0].append(row);
  });

  choose();
  everything();
  if (failed.length) detail(failed[0]);
  document.documentElement.dataset.drawn = "yes";
  page.detail = detail;
  page.span = span;
})();
