// --------------------------------------------------------------------------- the graph: modules, layers, drawing

/** The modules as boxes. A box holds consecutive nodes, so that a module called twice has two and no edge goes back. */
function grouped() {
  const root = {path: "", label: "", items: [], first: 0, last: nodes.length - 1, up: null};
  let open = [root];
  nodes.forEach((node, i) => {
    const paths = [];
    for (const name of node.module ? node.module.split(".") : [])    // blocks.0 is one step, not two
      if (/^\d+$/.test(name) && paths.length) paths.push(`${paths.pop()}.${name}`);
      else paths.push(paths.length ? `${paths.at(-1)}.${name}` : name);
    let depth = 0;
    while (depth < paths.length && open[depth + 1] && open[depth + 1].path === paths[depth]) depth++;
    open = open.slice(0, depth + 1);
    for (; depth < paths.length; depth++) {
      const up = open.at(-1), path = paths[depth];
      const label = up.path && path.startsWith(up.path + ".") ? path.slice(up.path.length + 1) : path;
      const box = {path, label, items: [], first: i, last: i, up, key: `m${i}.${path}`};
      up.items.push(box);
      open.push(box);
    }
    open.at(-1).items.push({node: i, first: i, last: i, up: open.at(-1), key: `n${i}`, label: ""});
    for (const box of open) box.last = i;
  });
  const flatten = box => {                               // a box around a single node is a name for the node
    box.items = box.items.map(item => {
      if (!item.items) return item;
      flatten(item);
      return item.items.length === 1 && item.items[0].items === undefined
        ? {...item.items[0], up: box, label: item.label === nodes[item.first].op ? "" : item.label} : item;
    });
  };
  flatten(root);
  return root;
}

const root = grouped();
const uses = nodes.map(() => []);                        // by whom a node's output is used
nodes.forEach((node, i) => node.inputs.forEach(([, kind, from]) => kind === "node" && uses[from].push(i)));
const chosen = new Map();                                // boxes that the reader opened or closed: true or false
let following = true;
const holds = (item, i) => item.first <= i && i <= item.last;
const isOpen = box => box === root || (chosen.get(box.key) ?? (following && holds(box, focusNode())));

const ruler = document.createElement("canvas").getContext("2d");
const widths = new Map();
function wide(text, font) {
  if (!widths.has(font + text)) {
    ruler.font = `${font} ${themed("--ui")}`;
    widths.set(font + text, ruler.measureText(text).width);
  }
  return widths.get(font + text);
}
const LINE = 19, PAD = 13, GAP = 24, BESIDE = 16, LANE = 13, HEAD = 30;
const leavesOf = i => [...new Set(nodes[i].inputs.filter(([, kind]) => kind === "leaf").map(([, , leaf]) => leaf))];
const lastName = name => name.split(".").at(-1);

/** Sizes of an item and, within an open box, places: layer by layer, edges that skip layers in lanes on the left. */
function place(item) {
  if (!item.items) {
    const node = nodes[item.node], tags = leavesOf(item.node);
    item.tags = tags.length > 2 ? [...tags.slice(0, 1), -1] : tags;
    item.texts = [item.label ? `${item.label}  ${node.op}` : node.op, times(node.shape)];
    item.core = Math.max(64, 22 + Math.max(wide(item.texts[0], "600 13px"), wide(item.texts[1], "11.5px")));
    item.beside = Math.max(0, ...item.tags.map(leaf => 24 + wide(tagName(item, leaf), "11.5px")));
    item.w = item.core + item.beside;
    item.h = 2 * LINE + 8;
    item.port = item.core / 2;
    return;
  }
  if (!isOpen(item)) {
    item.texts = [`▸ ${item.label}`, `${plural(item.last - item.first + 1, "node")}, ${times(nodes[item.last].shape)}`];
    item.w = item.core = 28 + Math.max(wide(item.texts[0], "600 13px"), wide(item.texts[1], "11.5px"));
    item.h = 2 * LINE + 10;
    item.port = item.w / 2;
    return;
  }
  const owner = new Map();
  item.items.forEach(inner => {
    place(inner);
    for (let i = inner.first; i <= inner.last; i++) owner.set(i, inner);
  });
  const edges = new Map(), entry = {layer: 0}, exit = {};
  const link = (from, to, pair) => {
    const key = `${from.key ?? "in"}>${to.key ?? "out"}`;
    if (!edges.has(key)) edges.set(key, {from, to, pairs: []});
    edges.get(key).pairs.push(pair);
  };
  for (let i = item.first; i <= item.last; i++) {
    for (const [, kind, from] of nodes[i].inputs)
      if (kind === "node" && owner.get(from) !== owner.get(i)) link(owner.get(from) ?? entry, owner.get(i), [from, i]);
    for (const user of uses[i]) if (user > item.last) link(owner.get(i), exit, [i, user]);
  }
  const list = [...edges.values()], into = new Map(item.items.map(inner => [inner, []]));
  list.forEach(edge => edge.to !== exit && into.get(edge.to).push(edge));
  item.items.forEach(inner => { inner.layer = 1 + Math.max(0, ...into.get(inner).map(edge => edge.from.layer)); });
  const least = new Map();                               // what nothing leads to stands right above its first use
  list.forEach(({from, to}) => to !== exit && least.set(from, Math.min(least.get(from) ?? Infinity, to.layer)));
  item.items.forEach(inner => { if (!into.get(inner).length && least.has(inner)) inner.layer = least.get(inner) - 1; });
  exit.layer = 1 + Math.max(...item.items.map(inner => inner.layer));

  const layers = [];
  item.items.forEach(inner => (layers[inner.layer] ??= []).push(inner));
  let left = 0, right = 0, y = item === root ? 6 : HEAD + 14;
  const centre = thing => thing === entry ? 0 : thing.x + thing.port;
  layers.forEach(layer => {
    const wish = inner => {
      const near = into.get(inner).map(edge => centre(edge.from));
      return near.length ? near.reduce((a, b) => a + b) / near.length : 0;
    };
    const wishes = new Map(layer.map(inner => [inner, wish(inner)]));
    const row = [...layer].sort((a, b) => wishes.get(a) - wishes.get(b) || a.first - b.first);
    let end = -Infinity, off = 0;
    row.forEach(inner => {
      inner.x = Math.max(wishes.get(inner) - inner.port, end + BESIDE);
      end = inner.x + inner.w;
      off += inner.x + inner.port - wishes.get(inner);
    });
    row.forEach(inner => {
      inner.x -= off / row.length;
      inner.y = y;
      left = Math.min(left, inner.x);
      right = Math.max(right, inner.x + inner.w);
    });
    y += Math.max(...row.map(inner => inner.h)) + GAP;
  });
  const bottom = layer => Math.max(...layers[layer].map(inner => inner.y + inner.h));
  const lanes = {"-1": [], 1: []}, taken = new Map();    // a lane per source, as long as its longest edge, on its side
  const long = list.filter(({from, to}) => to.layer - from.layer > 1).sort((a, b) => a.from.layer - b.from.layer);
  long.forEach(({from, to}) => {
    const span = taken.get(from) ?? {start: from.layer, end: 0};
    span.end = Math.max(span.end, to.layer);
    taken.set(from, span);
  });
  for (const [from, span] of taken) {
    span.side = centre(from) > (left + right) / 2 + 20 ? 1 : -1;
    const ends = lanes[span.side], free = ends.findIndex(end => end <= span.start);
    span.lane = free < 0 ? ends.length : free;
    ends[span.lane] = span.end;
  }
  const margin = item === root ? 4 : PAD, shift = margin + lanes[-1].length * LANE - left;
  item.items.forEach(inner => { inner.x += shift; });
  item.w = Math.max(shift + right + lanes[1].length * LANE + margin, item === root ? 0 : 44 + wide(item.label, "600 13px"));
  item.h = y - GAP + (item === root ? 6 : PAD + 4);
  item.core = item.w;
  item.port = shift;
  item.lines = list.map(({from, to, pairs}) => {
    const x1 = from === entry ? shift : from.x + from.port, y1 = from === entry ? 0 : from.y + from.h;
    const x2 = to === exit ? shift : to.x + to.port, y2 = to === exit ? item.h : to.y;
    if (to.layer - from.layer === 1 && from !== entry || to.layer === 1)
      return {pairs, d: `M${x1} ${y1}C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}`};
    const {side, lane: k} = taken.get(from), lane = shift + (side < 0 ? left : right) + side * (9 + k * LANE);
    const start = from === entry ? HEAD - 8 : bottom(from.layer) + 4, end = y2 - GAP / 2 - 2;
    return {pairs, d: `M${x1} ${y1}C${x1} ${start + 14} ${lane} ${start} ${lane} ${start + 22}V${Math.max(start + 22, end - 12)}`
      + `C${lane} ${end + 8} ${x2} ${end - 6} ${x2} ${y2}`};
  });
}
const tagName = (item, leaf) => leaf < 0 ? `${leavesOf(item.node).length - 1} more` : lastName(leaves[leaf].name);

let drawn = [];                                          // what is on the sheet: {item, group} and {pairs, line}
let openNow = null;                                      // the keys of the boxes that are drawn open
function drawGraph() {
  const open = [];
  (function each(box) {
    for (const item of box.items) if (item.items && isOpen(item)) {
      open.push(item.key);
      each(item);
    }
  })(root);
  if (openNow === open.join(" ")) return;
  openNow = open.join(" ");
  const focused = document.activeElement?.getAttribute?.("data-key");
  place(root);
  drawn = [];
  const wires = svg("g", {"aria-hidden": "true", transform: "translate(0 0)"});
  const things = svg("g", {role: "none"});
  const draw = (item, x, y, level) => {
    const at = {"data-key": item.key, role: "treeitem", "aria-level": level, tabindex: -1, transform: `translate(${x} ${y})`};
    if (!item.items) {
      const node = nodes[item.node];
      const group = svg("g", {...at, "aria-label": `${item.node} ${item.label} ${node.op}, ${times(node.shape)}`,
        onclick: () => show(stepOf(item.node))},
        svg("rect", {width: item.core, height: item.h}),
        item.label
          ? svg("text", {x: item.port, y: 19, "text-anchor": "middle"},
              svg("tspan", {class: "title"}, item.label), svg("tspan", {dx: 6}, node.op))
          : svg("text", {x: item.port, y: 19, "text-anchor": "middle", class: "title"}, node.op),
        svg("text", {x: item.port, y: 36, "text-anchor": "middle", class: "shape"}, item.texts[1]));
      things.append(group);
      drawn.push({item, group});
      item.tags.forEach((leaf, k) => {
        const to = leaf < 0 ? null : leaf, middle = item.tags.length === 1 ? item.h / 2 : 14 + k * LINE;
        const tag = svg("g", {...at, "data-key": `l${item.node}.${leaf}`, class: "leaf", "data-leaf": to, "aria-level": level + 1,
          transform: `translate(${x + item.core} ${y + middle - 9})`,
          "aria-label": to === null ? `${tagName(item, leaf)} leaves` : `leaf ${leaves[leaf].name}`,
          onclick: () => to === null ? show(stepOf(item.node)) : showLeaf(to)},
          svg("rect", {width: item.beside, height: 18}),
          svg("path", {d: "M5 9l4 -4l4 4l-4 4z"}), svg("text", {x: 17, y: 13}, tagName(item, leaf)));
        things.append(tag);
      });
      return;
    }
    if (item !== root) {
      const open = isOpen(item), toggle = () => setOpen(item, !isOpen(item));
      const group = svg("g", {...at, class: open ? "box" : "box closed", "aria-expanded": open,
        "aria-label": `module ${item.path}, ${plural(item.last - item.first + 1, "node")}`});
      if (open)
        group.append(svg("rect", {class: "back", width: item.w, height: item.h, rx: 10}),
          svg("rect", {width: item.w, height: item.h}),
          svg("g", {class: "head", onclick: toggle}, svg("rect", {width: item.w, height: HEAD - 4, fill: "transparent"}),
            svg("text", {x: 12, y: 19, class: "title"}, `▾ ${item.label}`)));
      else {
        group.addEventListener("click", toggle);
        group.style.cursor = "pointer";
        group.append(svg("rect", {class: "stack", x: 4, y: 4, width: item.w, height: item.h}),
          svg("rect", {width: item.w, height: item.h}),
          svg("text", {x: item.port, y: 20, "text-anchor": "middle", class: "title"}, item.texts[0]),
          svg("text", {x: item.port, y: 38, "text-anchor": "middle", class: "shape"}, item.texts[1]));
      }
      things.append(group);
      drawn.push({item, group});
      if (!open) return;
    }
    for (const {d, pairs} of item.lines) {
      const line = svg("path", {d, class: "edge", transform: `translate(${x} ${y})`});
      wires.append(line);
      drawn.push({pairs, line});
    }
    item.items.forEach(inner => draw(inner, x + inner.x, y + inner.y, item === root ? 1 : level + 1));
  };
  draw(root, 0, 0, 0);
  const image = svg("svg", {width: Math.ceil(root.w + 8), height: Math.ceil(root.h), role: "tree",
    "aria-label": "Nodes of the tape by module", onkeydown: graphKeys}, things);
  image.insertBefore(wires, things);
  $("sheet").replaceChildren(image);
  if (focused) image.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({preventScroll: true});
}

function setOpen(box, open) {
  chosen.set(box.key, open);
  drawGraph();
  markGraph();
}

/** Colours for what is done at this step, for the node of the step and for the edges of it. */
function markGraph(scroll = false) {
  const [kind, index] = steps[now.step], node = kind === FORWARD ? index : pulls[index].node;
  const made = new Set(), passed = new Set();
  for (let i = 0; i <= now.step; i++)
    if (steps[i][0] === FORWARD) made.add(steps[i][1]);
    else passed.add(pulls[steps[i][1]].node);
  const side = kind === FORWARD ? "is-forward" : "is-backward";
  let current = null;
  const dress = (thing, on, looks) => {                  // writing costs more than comparing
    if (thing.looks === looks) return;
    thing.looks = looks;
    on.setAttribute("class", looks);
  };
  for (const thing of drawn) {
    const {item, group, pairs, line} = thing;
    if (line) {
      dress(thing, line, pairs.some(([, to]) => to === node) ? `edge now ${side}` : "edge");
      continue;
    }
    const base = item.items ? isOpen(item) ? "box" : "box closed" : "node", shut = base !== "box";
    const here = node !== null && holds(item, node) && shut;
    let state = "";
    if (shut) state = passed.has(item.first) ? "pulled" : made.has(item.last) ? "done" : "later";
    dress(thing, group, `${base} ${state} ${here ? "now " + side : ""}`);
    if (here) current = group;
  }
  for (const old of $("sheet").querySelectorAll("[aria-current], [tabindex='0']")) {
    old.removeAttribute("aria-current");
    old.setAttribute("tabindex", -1);
  }
  if (current) {
    current.setAttribute("aria-current", "step");
    current.setAttribute("tabindex", 0);
  }
  if (!current) $("sheet").querySelector("[role=treeitem]")?.setAttribute("tabindex", 0);
  for (const leaf of $("sheet").querySelectorAll(".leaf"))
    leaf.classList.toggle("chosen", now.leaf !== null && leaf.getAttribute("data-leaf") === String(now.leaf));
  if (scroll && current) {
    const sheet = $("sheet").getBoundingClientRect(), box = current.getBoundingClientRect();
    const top = box.top - sheet.top - sheet.height / 2 + box.height / 2, far = Math.abs(top) > sheet.height;
    $("sheet").scrollBy({top, left: box.left - sheet.left - sheet.width / 2 + box.width / 2,
      behavior: far || calm.matches || now.playing ? "auto" : "smooth"});
  }
}

function graphKeys(event) {
  const all = [...$("sheet").querySelectorAll("[role=treeitem]")], at = all.indexOf(document.activeElement);
  const by = {ArrowUp: -1, ArrowDown: 1}[event.key];
  if (at < 0) return;
  if (by) {
    const next = all[at + by];
    if (next) next.focus();
  } else if (event.key === "Enter") {
    const thing = drawn.find(({group}) => group === all[at]);
    if (thing && thing.item.items) setOpen(thing.item, !isOpen(thing.item));
    else all[at].dispatchEvent(new MouseEvent("click"));
  } else return;
  event.preventDefault();
  event.stopPropagation();
}
