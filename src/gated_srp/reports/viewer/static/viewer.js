"use strict";
// One slide at a time: tiles by OpenSeadragon, patches as one small picture per layer that is laid over them.
(function () {
  const $ = (id) => document.getElementById(id);
  const made = (name, text, attributes) => {
    const node = document.createElement(name);
    if (text !== undefined && text !== null) node.textContent = text;
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    return node;
  };
  const state = { slide: 0, data: null, panes: [], count: 1, chosen: [], opacity: 0.6, shown: true, region: null, top: -1, busy: false };
  window.GatedSRPViewer = state; // for tests and for the curious

  // A layer in few words, with its run where there are several; the legend has the whole title.
  const brief = (layer) => layer.title.split(":")[0].replace(", mean over heads", "").replace(", in multiples of the slide's mean", "").replace(/^attention of /, "");
  const named = (layer) => (layer.run < 0 || state.data.runs.length < 2 ? "" : state.data.runs[layer.run].name + ": ") + brief(layer);

  const bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const floats = (text) => new Float32Array(bytes(text).buffer);

  // Loading -----------------------------------------------------------------------------------------------------------

  function load(number) {
    state.slide = number;
    $("name").textContent = "Loading " + GatedSRPIndex.slides[number] + "…";
    const script = made("script", null, { src: "slide/" + number + "/data.js" });
    script.onerror = () => fail("This slide could not be loaded. Its models may have refused it: see the terminal, or " + "slide/" + number + "/data.js.");
    script.onload = () => script.remove();
    document.head.append(script);
  }

  function fail(text) {
    $("failed").textContent = text;
    $("failed").hidden = false;
  }

  window.GatedSRP = {
    show(data) {
      $("failed").hidden = true;
      data.corners = floats(data.corners);
      data.count = data.corners.length / 2;
      for (const layer of data.layers) {
        layer.values = floats(layer.values);
        layer.places = bytes(layer.places);
      }
      for (const name of Object.keys(data.colours)) data.colours[name] = bytes(data.colours[name]);
      data.cells = index(data);
      regions(data);
      state.data = data;
      state.region = null;
      const at = data.layers.findIndex((layer) => layer.value === "attention");
      const other = data.layers.findIndex((layer) => layer.value === "attention" && layer.run === 1);
      const third = data.layers.findIndex((layer) => layer.value === (other < 0 ? "beta" : "difference"));
      const second = other < 0 ? data.layers.findIndex((layer) => layer.value === "change") : other;
      state.chosen = [at, second < 0 ? at : second, third < 0 ? at : third].map((layer) => Math.max(0, layer));
      $("name").textContent = data.name;
      document.title = data.name + " · gated-srp viewer";
      $("greyed").hidden = !data.image;
      layOut(state.count);
      answers();
      questions();
      $("notes").replaceChildren(...[data.about + ".", ...data.notes].map((note) => made("p", note, { class: "soft" })));
    },
  };

  // What was drawn on the slide: one path per class in its pixels, and a box that shows or hides it.
  function regions(data) {
    const boxes = data.drawn.map((kind) => {
      kind.path = new Path2D();
      for (const ring of kind.rings.map(floats)) {
        for (let i = 0; i < ring.length; i += 2) kind.path[i ? "lineTo" : "moveTo"](ring[i], ring[i + 1]);
        kind.path.closePath();
      }
      const label = made("label"), box = made("input", null, { type: "checkbox" }), line = made("i");
      kind.shown = box.checked = true;
      box.onchange = () => { kind.shown = box.checked; for (const one of state.panes) paint(one); };
      line.style.borderTop = "3px " + (kind.dashed ? "dashed " : "solid ") + kind.colour;
      label.append(box, " ", line, " ", kind.name);
      return label;
    });
    $("drawn").replaceChildren("Drawn:", ...boxes);
    $("drawn").hidden = !boxes.length;
  }

  // Which patches lie at a place: lists by square cells of a patch's side.
  function index(data) {
    const cells = new Map();
    for (let i = 0; i < data.count; i++) {
      const left = Math.floor(data.corners[2 * i] / data.side), top = Math.floor(data.corners[2 * i + 1] / data.side);
      const key = left + "," + top;
      if (cells.has(key)) cells.get(key).push(i);
      else cells.set(key, [i]);
    }
    return cells;
  }

  function patchAt(x, y) {
    const data = state.data, left = Math.floor(x / data.side), top = Math.floor(y / data.side);
    for (const [dx, dy] of [[0, 0], [-1, 0], [0, -1], [-1, -1]])
      for (const i of data.cells.get(left + dx + "," + (top + dy)) || []) {
        const px = data.corners[2 * i], py = data.corners[2 * i + 1];
        if (x >= px && x < px + data.side && y >= py && y < py + data.side) return i;
      }
    return -1;
  }

  // Panes -------------------------------------------------------------------------------------------------------------

  function layOut(count) {
    state.count = count;
    for (const button of $("layout").children) button.setAttribute("aria-pressed", String(Number(button.dataset.panes) === count));
    for (const pane of state.panes) pane.viewer.destroy();
    $("panes").replaceChildren();
    state.panes = [];
    strip();
    for (let i = 0; i < count; i++) state.panes.push(makePane(i)); // after everything else has taken its place on the screen
  }

  function source() {
    const data = state.data;
    const blank = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACH5BAEAAAAALAAAAAABAAEAAAICRAEAOw==";
    const full = Math.ceil(Math.log2(Math.max(data.size[0], data.size[1], 2)));
    return {
      width: data.size[0], height: data.size[1], tileSize: data.image ? 256 : 2 ** full, minLevel: data.image ? data.levels[0] : full,
      maxLevel: full,
      getTileUrl: (level, x, y) => (data.image ? "slide/" + state.slide + "/tiles/" + level + "/" + x + "_" + y + ".jpg" : blank),
      tileExists: (level, x, y) => {
        if (!data.image) return true;
        if (level > data.levels[1] || level < data.levels[0]) return false;
        const side = 256 * 2 ** (full - level);
        return x >= 0 && y >= 0 && x * side < data.size[0] && y * side < data.size[1];
      },
    };
  }

  function makePane(number) {
    const data = state.data;
    const pane = made("div", null, { class: "pane" }), stage = made("div", null, { class: "stage" });
    const choice = made("select", null, { "aria-label": "Layer of map " + (number + 1) });
    const groups = new Map();
    data.layers.forEach((layer, i) => {
      const name = layer.run < 0 ? "between runs" : data.runs[layer.run].name;
      if (!groups.has(name)) groups.set(name, made("optgroup", null, { label: name }));
      groups.get(name).append(made("option", named(layer), { value: i }));
    });
    choice.append(...groups.values());
    choice.value = state.chosen[number];
    choice.onchange = () => choose(number, Number(choice.value));
    const home = made("div", null, { class: "osd" }), over = made("canvas", null, { class: "over" });
    const scale = made("div", null, { class: "scale" }), legend = made("div", null, { class: "legend" });
    stage.append(home, over, scale);
    pane.append(choice, stage, legend);
    $("panes").append(pane);
    const one = { number, viewer: null, over, scale, legend, choice, stage, picture: null };
    recolour(one); // the legend takes its room before the slide is fitted into the rest
    const viewer = (one.viewer = OpenSeadragon({
      element: home, tileSources: source(), drawer: "canvas", showNavigationControl: false, showNavigator: false, animationTime: 0.3,
      minZoomImageRatio: 0.7, maxZoomPixelRatio: 8, gestureSettingsMouse: { clickToZoom: false }, crossOriginPolicy: false,
      silenceMultiImageWarnings: true, timeout: 120000,
    }));
    viewer.addHandler("update-viewport", () => paint(one));
    viewer.addHandler("open", () => { const first = state.panes[0]; if (one !== first && first.viewer.isOpen()) follow(first); paint(one); });
    viewer.addHandler("resize", () => paint(one));
    viewer.addHandler("zoom", () => follow(one));
    viewer.addHandler("pan", () => follow(one));
    new OpenSeadragon.MouseTracker({ element: stage, moveHandler: (event) => hover(one, event.position) });
    stage.addEventListener("pointerdown", (event) => { const box = stage.getBoundingClientRect(); hover(one, new OpenSeadragon.Point(event.clientX - box.left, event.clientY - box.top)); });
    drawing(one);
    return one;
  }

  // The others show what the one that is moved shows.
  function follow(one) {
    if (state.busy) return;
    state.busy = true;
    for (const other of state.panes)
      if (other !== one && other.viewer.isOpen()) {
        other.viewer.viewport.zoomTo(one.viewer.viewport.getZoom(false), null, true);
        other.viewer.viewport.panTo(one.viewer.viewport.getCenter(false), true);
      }
    state.busy = false;
  }

  function choose(number, layer) {
    state.chosen[number] = layer;
    const one = state.panes[number];
    one.choice.value = layer;
    recolour(one);
    paint(one);
    if (number === 0) strip();
  }

  // Every patch as a square of a small picture; zooming then only stretches it.
  function recolour(one) {
    const data = state.data, layer = data.layers[state.chosen[one.number]], colours = data.colours[layer.colours];
    const start = performance.now();
    const unit = Math.max(2, Math.min(8, 1024 / (Math.max(data.size[0], data.size[1]) / data.side))); // pixels of a patch
    const scale = unit / data.side;
    const picture = made("canvas");
    picture.width = Math.max(1, Math.ceil(data.size[0] * scale));
    picture.height = Math.max(1, Math.ceil(data.size[1] * scale));
    const pixels = new Uint8ClampedArray(picture.width * picture.height * 4), words = new Uint32Array(pixels.buffer);
    const middle = layer.colours === "PuOr_r";
    for (let i = 0; i < data.count; i++) {
      const place = layer.places[i];
      if (place === 255) continue;
      // Around the middle nothing happens, so that the tissue is seen there; from a quarter of the way on, colours are the legend's.
      const alpha = middle && data.image ? Math.min(255, 30 + Math.abs(place - 127) * 7) : 255;
      const word = (alpha << 24) | (colours[3 * place + 2] << 16) | (colours[3 * place + 1] << 8) | colours[3 * place];
      const x = data.corners[2 * i] * scale, y = data.corners[2 * i + 1] * scale;
      const left = Math.max(0, Math.round(x)), right = Math.min(picture.width, Math.max(left + 1, Math.round(x + unit)));
      const top = Math.max(0, Math.round(y)), bottom = Math.min(picture.height, Math.max(top + 1, Math.round(y + unit)));
      for (let row = top; row < bottom; row++) words.fill(word, row * picture.width + left, row * picture.width + right);
    }
    picture.getContext("2d").putImageData(new ImageData(pixels, picture.width, picture.height), 0, 0);
    one.picture = picture;
    legendOf(one, layer, colours);
    one.stage.classList.toggle("grey", $("grey").checked && data.image);
    state.switched = performance.now() - start;
  }

  function corner(one, x, y) {
    return one.viewer.viewport.imageToViewerElementCoordinates(new OpenSeadragon.Point(x, y));
  }

  function paint(one) {
    if (!one.picture || !one.viewer || !one.viewer.isOpen() || !one.viewer.world.getItemCount()) return;
    const data = state.data, over = one.over, ratio = window.devicePixelRatio || 1;
    const width = Math.round(one.stage.clientWidth * ratio), height = Math.round(one.stage.clientHeight * ratio);
    if (over.width !== width || over.height !== height) { over.width = width; over.height = height; }
    const pen = over.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const first = corner(one, 0, 0), last = corner(one, data.size[0], data.size[1]);
    if (state.shown) {
      pen.globalAlpha = data.image ? state.opacity : 1;
      pen.imageSmoothingEnabled = false;
      const unit = one.picture.width / data.size[0];
      pen.drawImage(one.picture, 0, 0, data.size[0] * unit, data.size[1] * unit, first.x, first.y, last.x - first.x, last.y - first.y);
      pen.globalAlpha = 1;
    }
    const zoom = (last.x - first.x) / data.size[0];
    pen.save();
    pen.translate(first.x, first.y);
    pen.scale(zoom, zoom);
    for (const kind of data.drawn.filter((kind) => kind.shown))
      for (const [width, colour, dash] of [[5, "#fff", []], [2.5, kind.colour, kind.dashed ? [8, 5] : []]]) {
        pen.lineWidth = width / zoom; pen.strokeStyle = colour; pen.setLineDash(dash.map((part) => part / zoom));
        pen.stroke(kind.path);
      }
    pen.restore();
    pen.font = "600 12px system-ui, sans-serif";
    (data.layers[state.chosen[0]].top || []).forEach((row, i) => {
      const place = corner(one, data.corners[2 * row], data.corners[2 * row + 1]), side = data.side * zoom;
      pen.lineWidth = i === state.top ? 4 : 2;
      pen.strokeStyle = "#fff"; pen.strokeRect(place.x - 1, place.y - 1, side + 2, side + 2);
      pen.strokeStyle = "#111"; pen.strokeRect(place.x, place.y, side, side);
      const up = side < 20 ? -4 : 14; // in its patch where there is room, else above it
      pen.lineWidth = 3; pen.strokeStyle = "#fff"; pen.strokeText(String(i + 1), place.x + 3, place.y + up);
      pen.fillStyle = "#111"; pen.fillText(String(i + 1), place.x + 3, place.y + up);
    });
    if (state.region) outline(one, pen, state.region, true);
    if (one.line) outline(one, pen, one.line, false);
    bar(one, zoom);
  }

  function outline(one, pen, points, closed) {
    pen.beginPath();
    points.forEach((point, i) => { const at = corner(one, point[0], point[1]); if (i) pen.lineTo(at.x, at.y); else pen.moveTo(at.x, at.y); });
    if (closed) pen.closePath();
    pen.lineWidth = 4; pen.strokeStyle = "#fff"; pen.stroke();
    pen.lineWidth = 2; pen.strokeStyle = "#111"; pen.setLineDash([6, 4]); pen.stroke(); pen.setLineDash([]);
  }

  // A bar of a round length; micrometres where the slide says how large its pixels are.
  function bar(one, zoom) {
    const mpp = state.data.mpp, most = one.stage.clientWidth / 4 / zoom * (mpp || 1);
    const power = 10 ** Math.floor(Math.log10(most)), length = [5, 2, 1].map((n) => n * power).find((n) => n <= most) || power;
    const text = mpp ? (length >= 1000 ? length / 1000 + " mm" : length + " µm") : length + " pixels";
    const magnification = state.data.magnification ? " · at " + Number((state.data.magnification * zoom).toPrecision(2)) + "x" : "";
    one.scale.replaceChildren(made("span", text + magnification), made("i"));
    one.scale.lastChild.style.width = length / (mpp || 1) * zoom + "px";
  }

  function legendOf(one, layer, colours) {
    const strip = made("canvas"), ticks = made("div", null, { class: "ticks" });
    strip.width = 255; strip.height = 1;
    const pixels = new Uint8ClampedArray(255 * 4);
    for (let i = 0; i < 255; i++) pixels.set([colours[3 * i], colours[3 * i + 1], colours[3 * i + 2], 255], 4 * i);
    strip.getContext("2d").putImageData(new ImageData(pixels, 255, 1), 0, 0);
    for (const [place, text] of layer.ticks) {
      const tick = made("span", (place === 0 && layer.beyond[0] ? "◂" : "") + text + (place === 1 && layer.beyond[1] ? "▸" : "")); // arrows: values lie beyond
      tick.style.left = 100 * place + "%";
      ticks.append(tick);
    }
    one.legend.replaceChildren(strip, ticks, made("p", (layer.run < 0 ? brief(layer) : layer.title) + (layer.title.includes(layer.label) ? "" : ", " + layer.label) + "."), made("p", "This slide: " + layer.note + "."), made("p", layer.words, { class: "soft" }));
  }

  // Numbers -----------------------------------------------------------------------------------------------------------

  const spoken = (value) => (Number.isNaN(value) ? "not seen" : Math.abs(value) >= 1e-3 || value === 0 ? value.toPrecision(3) : value.toExponential(1));

  // As it is, and as the colour bar counts it.
  const counted = (layer, value) => spoken(value) + (!layer.unit || Number.isNaN(value) ? "" : layer.signed ? " (" + (100 * value / layer.unit).toFixed(1) + " %)" : " (" + (value / layer.unit).toPrecision(3) + " x)");

  function hover(one, position) {
    if (!one.viewer.isOpen() || !one.viewer.world.getItemCount()) return;
    const place = one.viewer.viewport.viewerElementToImageCoordinates(position), data = state.data, row = patchAt(place.x, place.y);
    state.under = row;
    if (row < 0) return;
    const table = made("table");
    table.append(made("caption", "Patch " + row + " at (" + data.corners[2 * row] + ", " + data.corners[2 * row + 1] + ")"));
    for (const layer of data.layers) {
      const line = made("tr");
      line.append(made("th", named(layer), { scope: "row" }), made("td", counted(layer, layer.values[row])));
      table.append(line);
    }
    $("patch").replaceChildren(table);
  }

  function answerTable(caption, found) {
    const table = made("table");
    table.append(made("caption", caption));
    for (const [name, value] of Object.entries(found)) {
      const line = made("tr");
      line.append(made("th", name, { scope: "row" }), made("td", value));
      table.append(line);
    }
    return table;
  }

  function answers() {
    $("answers").replaceChildren(...state.data.runs.map((run) => (Object.keys(run.answers).length ? answerTable(run.name, run.answers) : made("p", run.name + ": no prediction", { class: "soft" }))));
  }

  // Top patches -------------------------------------------------------------------------------------------------------

  function strip() {
    const data = state.data, layer = data.layers[state.chosen[0]];
    state.top = -1;
    const buttons = layer.top.map((row, i) => {
      const button = made("button", null, { title: "Go to patch " + row });
      if (data.image) button.append(made("img", null, { src: "slide/" + state.slide + "/patch/" + row + ".jpg", alt: "patch " + (i + 1), loading: "lazy" }));
      button.append(made("span", i + 1 + ": " + counted(layer, layer.values[row])));
      button.onclick = () => jump(i);
      return button;
    });
    $("strip").replaceChildren(...(buttons.length ? buttons : [made("p", "No patch stands out: the highest values are all the same.", { class: "soft" })]));
    for (const one of state.panes) paint(one);
  }

  function jump(i) {
    const data = state.data, top = data.layers[state.chosen[0]].top;
    if (!top.length) return;
    state.top = (i + top.length) % top.length;
    const row = top[state.top], viewport = state.panes[0].viewer.viewport, around = 2 * data.side;
    viewport.fitBounds(viewport.imageToViewportRectangle(data.corners[2 * row] - around, data.corners[2 * row + 1] - around, data.side + 2 * around, data.side + 2 * around), true);
    follow(state.panes[0]);
    for (const one of state.panes) paint(one);
  }

  // What if -----------------------------------------------------------------------------------------------------------

  function questions() {
    const form = $("whatif").querySelector("form"), data = state.data;
    const gated = [...new Set(data.layers.filter((layer) => layer.value === "beta").map((layer) => layer.run))];
    $("whatif").hidden = !gated.length;
    form.run.replaceChildren(...gated.map((run) => made("option", data.runs[run].name, { value: run })));
    const layers = [...new Set(data.layers.filter((layer) => layer.value === "beta").map((layer) => layer.title.match(/layer (\d+)/)[1]))];
    form.layer.replaceChildren(made("option", "all", { value: "" }), ...layers.map((layer) => made("option", layer, { value: layer })));
    $("outcome").replaceChildren();
    if (!GatedSRPIndex.served) {
      form.hidden = true;
      $("outcome").replaceChildren(made("p", "This folder has no model to ask. Start the viewer with gated-srp view to set gates and see the answer change.", { class: "soft" }));
    }
    form.onsubmit = async (event) => {
      event.preventDefault();
      const question = { slide: state.slide, run: Number(form.run.value), beta: Number(form.beta.value), layer: form.layer.value ? Number(form.layer.value) : null, regime: form.regime.value || null, region: state.region };
      $("outcome").replaceChildren(made("p", "Computing…", { class: "soft" }));
      try {
        const answer = await fetch("what-if", { method: "POST", body: JSON.stringify(question), headers: { "Content-Type": "application/json" } });
        if (!answer.ok) throw new Error(await answer.text());
        const found = await answer.json();
        $("outcome").replaceChildren(made("p", "In " + found.patches + " of " + state.data.count + " patches."), answerTable("as learned", found.before), answerTable("with gates set", found.after));
        $("outcome").scrollIntoView({ block: "nearest" });
      } catch (error) {
        $("outcome").replaceChildren(made("p", String(error.message || error)));
      }
    };
  }

  function drawing(one) {
    const place = (event) => {
      const box = one.over.getBoundingClientRect();
      const at = one.viewer.viewport.viewerElementToImageCoordinates(new OpenSeadragon.Point(event.clientX - box.left, event.clientY - box.top));
      return [at.x, at.y];
    };
    one.over.onpointerdown = (event) => { one.line = [place(event)]; one.over.setPointerCapture(event.pointerId); };
    one.over.onpointermove = (event) => { if (one.line) { one.line.push(place(event)); paint(one); } };
    one.over.onpointerup = () => {
      if (one.line && one.line.length > 2) state.region = one.line;
      one.line = null;
      draw(false);
    };
  }

  function draw(on) {
    $("draw").setAttribute("aria-pressed", String(on));
    $("clear").hidden = !state.region;
    for (const one of state.panes) { one.stage.classList.toggle("drawing", on); paint(one); }
  }

  // Controls ----------------------------------------------------------------------------------------------------------

  $("draw").onclick = () => draw($("draw").getAttribute("aria-pressed") !== "true");
  $("clear").onclick = () => { state.region = null; draw(false); };
  for (const button of $("layout").children) button.onclick = () => layOut(Number(button.dataset.panes));
  $("opacity").oninput = () => { state.opacity = $("opacity").value / 100; for (const one of state.panes) paint(one); };
  $("grey").onchange = () => { for (const one of state.panes) one.stage.classList.toggle("grey", $("grey").checked && state.data.image); };
  $("home").onclick = () => { state.panes[0].viewer.viewport.goHome(true); follow(state.panes[0]); };
  $("help").onclick = () => { $("keys").hidden = !$("keys").hidden; $("help").setAttribute("aria-expanded", String(!$("keys").hidden)); };
  document.addEventListener("keydown", (event) => {
    if (!state.data || event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
    const count = state.data.layers.length, view = state.panes[0].viewer.viewport, seen = view.getBounds();
    const move = (across, down) => () => { view.panBy(new OpenSeadragon.Point(0.15 * across * seen.width, 0.15 * down * seen.height)); view.applyConstraints(); };
    const zoom = (factor) => () => { view.zoomBy(factor); view.applyConstraints(); };
    const act = {
      "+": zoom(1.4), "=": zoom(1.4), "-": zoom(1 / 1.4), arrowleft: move(-1, 0), a: move(-1, 0), arrowright: move(1, 0), d: move(1, 0),
      arrowup: move(0, -1), w: move(0, -1), arrowdown: move(0, 1), s: move(0, 1),
      l: () => choose(0, (state.chosen[0] + 1) % count), k: () => choose(0, (state.chosen[0] + count - 1) % count),
      o: () => { state.shown = !state.shown; for (const one of state.panes) paint(one); }, g: () => $("grey").click(),
      r: () => { const on = !state.data.drawn.some((kind) => kind.shown); for (const box of $("drawn").querySelectorAll("input")) if (box.checked !== on) box.click(); },
      n: () => jump(state.top + 1), p: () => jump(state.top < 0 ? -1 : state.top - 1), 0: () => $("home").click(),
      1: () => layOut(1), 2: () => layOut(2), 3: () => layOut(3),
    }[event.key.toLowerCase()];
    if (act) { act(); event.preventDefault(); event.stopPropagation(); }
  }, true);

  if (GatedSRPIndex.slides.length > 1) {
    $("choose").hidden = false;
    $("slides").append(...GatedSRPIndex.slides.map((name, i) => made("option", name, { value: i })));
    $("slides").onchange = () => load(Number($("slides").value));
  }
  load(0);
})();
