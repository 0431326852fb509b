
(() => {
  const { data, phases, kinds, time, bytes, rate, count, worker, unsure, lost } = page;
  const AXIS = 24, ROW = 20, GAP = 7, FONT = "12px system-ui, sans-serif";
  const box = document.getElementById("lanes");
  const canvas = document.getElementById("canvas");
  const rates = document.getElementById("rates");
  const spacer = document.getElementById("spacer");
  const view = { from: 0, to: 1, rows: [], height: 0, hover: null, chosen: null };
  let color = page.style();
  let frame = 0;

  const gutter = () => Math.min(310, box.clientWidth * 0.35);
  const scale = () => (box.clientWidth - gutter() - 12) / (view.to - view.from);
  const x = (at) => gutter() + 6 + (at - view.from) * scale();
  const at = (px) => view.from + (px - gutter() - 6) / scale();

  // The rows of the picture: workers, then the sessions of each request.
  const layOut = (requests) => {
    view.rows = [];
    let y = 0;
    const push = (row, height) => { row.y = y; row.height = height; view.rows.push(row); y += height; };
    data.workers.forEach((_, index) => push({ kind: "worker", worker: index }, ROW));
    requests.forEach((request) => {
      y += GAP;
      request.lanes.forEach((lane, index) => push({ kind: "lane", request, lane, first: index === 0 }, ROW));
      request.unrecorded.forEach(([index, from, to]) => push({ kind: "ghost", request, worker: index, from, to }, ROW));
    });
    view.height = y + 10;
    resize();
  };
  const resize = () => {
    const ratio = window.devicePixelRatio || 1;
    for (const [element, height] of [[canvas, box.clientHeight], [rates, rates.clientHeight]]) {
      const width = element === canvas ? box.clientWidth : element.clientWidth;
      element.width = Math.max(1, Math.round(width * ratio));
      element.height = Math.max(1, Math.round(height * ratio));
      if (element === canvas) element.style.height = height + "px";
    }
    spacer.style.height = Math.max(0, view.height + AXIS - box.clientHeight) + "px";
    ask();
  };
  const ask = () => { frame ||= requestAnimationFrame(() => { frame = 0; draw(); }); };

  const begin = (element) => {
    const ratio = window.devicePixelRatio || 1;
    const pen = element.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, element.width, element.height);
    pen.font = FONT;
    pen.textBaseline = "middle";
    return pen;
  };
  const fit = (pen, text, width) => {
    if (pen.measureText(text).width <= width) return text;
    let [low, high] = [0, text.length];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (pen.measureText(text.slice(0, middle) + "…").width <= width) low = middle; else high = middle - 1;
    }
    return text.slice(0, low) + "…";
  };
  const rect = (pen, fill, from, to, y, height, least = 1) => {
    const [left, right] = [Math.max(x(from), gutter()), Math.min(x(to), box.clientWidth)];
    if (right < gutter() || left > box.clientWidth) return;
    pen.fillStyle = fill;
    pen.fillRect(left, y, Math.max(least, right - left), height);
  };
  const seen = (px) => px >= gutter() && px <= box.clientWidth;

  const ticks = () => {
    const wanted = (view.to - view.from) / Math.max(2, (box.clientWidth - gutter()) / 110);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= wanted);
    const all = [];
    // Centuries away, the next tick may be the same number.
    for (let tick = Math.ceil(view.from / step) * step; tick <= view.to && all.at(-1) !== tick; tick += step) all.push(tick);
    return { all, step };
  };
  const label = (tick, step) => {
    const [size, name] = view.to >= 2e6 ? [1e6, " s"] : view.to >= 2e3 ? [1e3, " ms"] : [1, " µs"];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
    return (tick / size).toFixed(Math.min(9, digits)) + name;
  };

  // The part of a list, in the order of time, that is between two moments.
  const between = (list, from, to) => {
    const place = (when) => {
      let [low, high] = [0, list.length];
      while (low < high) { const middle = (low + high) >> 1; if (list[middle][0] < when) low = middle + 1; else high = middle; }
      return low;
    };
    return list.slice(place(from), place(to));
  };
  const marksOf = data.workers.map((_, index) => data.incidents.filter((one) => !one.request && one.worker === index));

  const drawWorker = (pen, row, y) => {
    const { name, record } = data.workers[row.worker];
    pen.fillStyle = color("--text");
    pen.font = "600 " + FONT;
    pen.fillText(fit(pen, name, gutter() - 130), 10, y + ROW / 2);
    pen.font = FONT;
    pen.fillStyle = color(record ? "--soft" : "--bad");
    const uncertain = record && record.unsure === null ? "clock not known" : record && record.unsure ? "clock ± " + time(record.unsure) : "this page's clock";
    pen.fillText(fit(pen, record ? uncertain : "no record: lost", 116), gutter() - 122, y + ROW / 2);
    if (!record) {
      pen.setLineDash([4, 4]);
      pen.strokeStyle = color("--ghost");
      pen.beginPath();
      pen.moveTo(gutter(), y + ROW / 2);
      pen.lineTo(Math.min(lost.has(row.worker) ? x(lost.get(row.worker)) : box.clientWidth, box.clientWidth), y + ROW / 2);
      pen.stroke();
      pen.setLineDash([]);
    } else {
      pen.fillStyle = color("--lease");
      for (const [when, , heard] of between(record.beats, view.from, view.to)) {
        if (!heard && seen(x(when))) pen.fillRect(x(when) - 0.5, y + 7, 1, 6);
      }
    }
    marksOf[row.worker].forEach((mark) => diamond(pen, x(mark.at), y + ROW / 2, color(kinds[mark.kind])));
    if (lost.has(row.worker)) cross(pen, x(lost.get(row.worker)), y + ROW / 2, color("--bad"));
  };
  const diamond = (pen, px, y, fill) => {
    if (!seen(px)) return;
    pen.fillStyle = fill;
    pen.beginPath();
    pen.moveTo(px, y - 5); pen.lineTo(px + 5, y); pen.lineTo(px, y + 5); pen.lineTo(px - 5, y);
    pen.fill();
  };
  const cross = (pen, px, y, stroke) => {
    if (!seen(px)) return;
    pen.strokeStyle = stroke;
    pen.lineWidth = 2.2;
    pen.beginPath();
    pen.moveTo(px - 4, y - 4); pen.lineTo(px + 4, y + 4); pen.moveTo(px + 4, y - 4); pen.lineTo(px - 4, y + 4);
    pen.stroke();
    pen.lineWidth = 1;
  };

  // A text after a bar, or in front of its end if there is no room after it.
  const say = (pen, text, after, before, from, y, name) => {
    const wide = Math.min(pen.measureText(text).width, 640);
    pen.fillStyle = color(name);
    if (after >= gutter() && after + Math.min(wide, 260) < box.clientWidth) {
      pen.fillText(fit(pen, text, box.clientWidth - after - 6), after, y + ROW / 2);
    } else if (before <= box.clientWidth && before - wide > Math.max(from, gutter())) {
      pen.fillStyle = color("--back");
      pen.fillRect(before - wide - 5, y + 3, wide + 8, ROW - 6);
      pen.fillStyle = color(name);
      pen.fillText(fit(pen, text, wide + 1), before - wide, y + ROW / 2);
    }
  };
  const requestLabel = (request) => {
    if (request.label) return request.label;
    return "room " + (request.room.length > 20 ? request.room.slice(0, 17) + "…" : request.room);
  };
  const drawLane = (pen, row, y) => {
    const { request, lane } = row;
    if (row.first) {
      pen.fillStyle = color(request.retry_of === null ? "--text" : "--again");
      pen.font = "600 " + FONT;
      pen.fillText(fit(pen, requestLabel(request), gutter() - 172), 10, y + ROW / 2);
      pen.font = FONT;
    }
    pen.fillStyle = color("--soft");
    pen.fillText(fit(pen, (lane.sends ? "from " : "to ") + worker(lane.worker), 120), gutter() - 156, y + ROW / 2);
    pen.fillStyle = color(lane.outcome === "ok" ? "--ok" : lane.outcome === "failed" ? "--bad" : "--soft");
    pen.fillText(lane.outcome === "ok" ? "✓" : lane.outcome === "failed" ? "✗" : "…", gutter() - 18, y + ROW / 2);
    for (const [phase, from, to] of lane.spans) rect(pen, color(phases[phase][0]), from, to, y + 4, ROW - 8);
    for (const [from, to, , , , error] of lane.posts) rect(pen, color(error || to === null ? "--bad" : "--post"), from, to === null ? lane.to : to, y + 6, ROW - 12, 1.5);
    if (lane.lease) {
      rect(pen, color("--lease"), lane.lease[0], lane.lease[1], y + ROW - 4, 2);
      const record = data.workers[lane.worker].record;
      for (const [when, peer, , leases] of record ? between(record.beats, Math.max(view.from, lane.lease[0]), Math.min(view.to, lane.lease[1])) : []) {
        if (leases > 0 && lane.peers.includes(peer) && seen(x(when))) pen.fillRect(x(when) - 0.5, y + ROW - 7, 1.5, 6);
      }
    }
    if (lane.expired !== null) diamond(pen, x(lane.expired), y + ROW / 2, color("--lease"));
    for (const when of lane.repeats) {
      if (!seen(x(when))) continue;
      pen.fillStyle = color("--again");
      pen.beginPath();
      pen.moveTo(x(when) - 4, y + 2); pen.lineTo(x(when) + 4, y + 2); pen.lineTo(x(when), y + 9);
      pen.fill();
    }
    const end = lane.spans.filter(([phase]) => phases[phase] && !["Closing", "Failing", "Quarantine"].includes(phase)).reduce((last, [, , to]) => Math.max(last, to), lane.from);
    if (lane.outcome === "failed") {
      cross(pen, x(end), y + ROW / 2, color("--bad"));
      const again = row.first && request.retriedBy !== undefined ? " → sent again as " + data.requests[request.retriedBy].short : "";
      say(pen, lane.failure[1] + again, x(Math.max(end, lane.to)) + 8, x(end) - 8, x(lane.from), y, "--bad");
    } else if (row.first && request.retriedBy !== undefined) {
      say(pen, "→ sent again as " + data.requests[request.retriedBy].short, x(lane.to) + 8, x(lane.to) - 8, x(lane.from), y, "--again");
    }
    const off = unsure(lane.worker);
    if (off === null || off * scale() >= 2) {
      pen.strokeStyle = color("--soft");
      for (const edge of [lane.from, lane.to]) {
        const half = off === null ? 12 : Math.min(off * scale(), box.clientWidth);
        const [left, right] = [x(edge) - half, x(edge) + half];
        if (right < gutter() || left > box.clientWidth) continue;
        if (off === null) pen.setLineDash([2, 2]);
        pen.beginPath();
        pen.moveTo(Math.max(left, gutter()), y + ROW / 2 + 0.5); pen.lineTo(right, y + ROW / 2 + 0.5);
        for (const px of [left, right]) { if (seen(px)) { pen.moveTo(px, y + 7); pen.lineTo(px, y + ROW - 7); } }
        pen.stroke();
        pen.setLineDash([]);
      }
    }
  };
  const drawGhost = (pen, row, y) => {
    pen.fillStyle = color("--ghost");
    pen.fillText(fit(pen, (row.request.lanes[0].sends ? "to " : "from ") + worker(row.worker), 120), gutter() - 156, y + ROW / 2);
    pen.fillText("?", gutter() - 16, y + ROW / 2);
    pen.setLineDash([3, 3]);
    pen.strokeStyle = color("--ghost");
    const [left, right] = [Math.max(x(row.from), gutter()), Math.min(x(row.to), box.clientWidth)];
    if (right >= left) pen.strokeRect(left, y + 5.5, Math.max(3, right - left), ROW - 11);
    pen.setLineDash([]);
    if (right + 8 > gutter() && right < box.clientWidth - 60) pen.fillText(fit(pen, "no record", box.clientWidth - right - 12), right + 8, y + ROW / 2);
  };

  const draw = () => {
    const pen = begin(canvas);
    const [width, height] = [box.clientWidth, box.clientHeight];
    const { all, step } = ticks();
    const rows = visible();
    for (const row of rows) {
      const y = row.y - box.scrollTop + AXIS;
      if (row.request && row.request.at % 2 === 0) { pen.fillStyle = color("--zebra"); pen.fillRect(0, y, width, row.height); }
      if (row.request && (row.request === view.chosen || row === view.hover)) { pen.fillStyle = color("--hover"); pen.fillRect(0, y, width, row.height); }
    }
    pen.fillStyle = color("--line");
    for (const tick of all) if (seen(x(tick))) pen.fillRect(Math.round(x(tick)), AXIS, 1, height);
    for (const row of rows) {
      const y = row.y - box.scrollTop + AXIS;
      if (row.kind === "worker") drawWorker(pen, row, y);
      else if (row.kind === "lane") drawLane(pen, row, y);
      else drawGhost(pen, row, y);
    }
    for (const [who, when] of lost) {
      if (!seen(x(when))) continue;
      pen.strokeStyle = color("--bad");
      pen.setLineDash([5, 4]);
      pen.beginPath(); pen.moveTo(x(when), AXIS); pen.lineTo(x(when), height); pen.stroke();
      pen.setLineDash([]);
    }
    pen.fillStyle = color("--panel");
    pen.fillRect(0, 0, width, AXIS);
    pen.fillStyle = color("--line");
    pen.fillRect(0, AXIS - 1, width, 1);
    pen.fillRect(gutter(), 0, 1, height);
    pen.fillStyle = color("--soft");
    for (const tick of all) if (seen(x(tick))) pen.fillText(label(tick, step), x(tick) + 3, AXIS / 2);
    for (const [who, when] of lost) {
      if (!seen(x(when))) continue;
      const text = worker(who) + " lost";
      const wide = pen.measureText(text).width + 8;
      const left = Math.min(x(when) + 2, width - wide);
      pen.fillStyle = color("--bad");
      pen.fillRect(left, 3, wide, AXIS - 7);
      pen.fillStyle = color("--panel");
      pen.fillText(text, left + 4, AXIS / 2);
    }
    drawRates(all);
  };
  const visible = () => {
    const [top, bottom] = [box.scrollTop, box.scrollTop + box.clientHeight];
    let [low, high] = [0, view.rows.length];
    while (low < high) { const middle = (low + high) >> 1; if (view.rows[middle].y + view.rows[middle].height < top) low = middle + 1; else high = middle; }
    const rows = [];
    for (; low < view.rows.length && view.rows[low].y < bottom; low += 1) rows.push(view.rows[low]);
    return rows;
  };

  const MOST = 7;
  const pairs = new Map();
  data.requests.forEach((request) => request.lanes.forEach((lane) => lane.posts.forEach(([from, to, size, peer, write, error]) => {
    if (to === null || error) return;
    const [source, target] = write ? [lane.worker, peer] : [peer, lane.worker];
    const name = worker(source) + " → " + worker(target);
    if (!pairs.has(name)) pairs.set(name, { name, posts: [], bytes: 0 });
    pairs.get(name).posts.push([from, to, size]);
    pairs.get(name).bytes += size;
  })));
  const series = [...pairs.values()].sort((a, b) => b.bytes - a.bytes);
  if (series.length > MOST) series.splice(MOST - 1, Infinity, { name: "all others", posts: series.slice(MOST - 1).flatMap((one) => one.posts), bytes: series.slice(MOST - 1).reduce((sum, one) => sum + one.bytes, 0) });
  const hue = (index) => "hsl(" + [212, 28, 150, 285, 340, 60, 0][index % 7] + " 62% 52%)";
  const drawRates = (all) => {
    const pen = begin(rates);
    const [left, width, height] = [gutter(), box.clientWidth - gutter() - 12, rates.clientHeight];
    const bins = Math.max(40, Math.min(240, Math.floor(width / 6)));
    const span = (view.to - view.from) / bins;
    const sums = series.map(() => new Float64Array(bins));
    series.forEach((one, index) => one.posts.forEach(([from, to, size]) => {
      const [first, last] = [Math.floor((from - view.from) / span), Math.floor((to - view.from) / span)];
      for (let bin = Math.max(0, first); bin <= Math.min(bins - 1, last); bin += 1) {
        const [a, b] = [view.from + bin * span, view.from + (bin + 1) * span];
        const share = to > from ? Math.max(0, Math.min(to, b) - Math.max(from, a)) / (to - from) : 1;
        sums[index][bin] += size * share;
      }
    }));
    let most = 0;
    for (let bin = 0; bin < bins; bin += 1) most = Math.max(most, sums.reduce((sum, one) => sum + one[bin], 0));
    pen.fillStyle = color("--line");
    for (const tick of all) if (seen(x(tick))) pen.fillRect(Math.round(x(tick)), 0, 1, height);
    for (let bin = 0; bin < bins && most > 0; bin += 1) {
      let y = height - 1;
      sums.forEach((one, index) => {
        const tall = (one[bin] / most) * (height - 16);
        pen.fillStyle = hue(index);
        pen.fillRect(left + 6 + (bin * width) / bins, y - tall, width / bins - 0.5, tall);
        y -= tall;
      });
    }
    pen.fillStyle = color("--soft");
    pen.fillText("bytes per second", 10, height / 2 - 8);
    pen.fillText(most > 0 ? "top of the scale: " + rate((most / span) * 1e6) : "nothing was moved in this time", 10, height / 2 + 8);
  };

  Object.assign(page, { draw, view, box, canvas, rates, layOut, resize, ask, x, at, gutter, scale, visible, series, hue, AXIS, ROW,
    recolor: () => { color = page.style(); ask(); } });
})();
