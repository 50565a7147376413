// -------------------------------------------------------------------------------------------------- the panel

const now = {step: 0, leaf: null, playing: 0};
const focusNode = () => {
  const [kind, index] = steps[now.step];
  return (kind === FORWARD ? index : pulls[index].node) ?? -1;
};
const stepsOfNode = nodes.map(() => []), pullSteps = nodes.map(() => []);
steps.forEach(([kind, index], at) => {
  const node = kind === FORWARD ? index : pulls[index].node;
  if (node !== null) (kind === FORWARD ? stepsOfNode : pullSteps)[node].push(at);
});
/** The step of a node in the pass that is shown, or in the other one. */
function stepOf(node, other = false) {
  const back = (steps[now.step][0] === BACKWARD) !== other, last = pullSteps[node];
  return back && last.length ? last.find(at => at >= now.step) ?? last.at(-1) : stepsOfNode[node][0];
}
const runs = new Set(pulls.map(p => p.run)).size;

const namesOf = node => [...node.inputs.map(([name]) => name), ...Object.keys(node.params)];
const absent = node =>
  new Set(node.inputs.filter(([, kind, which]) => kind === "constant" && which === null).map(([name]) => name));
/** The lines of a node's rule, but for those of arguments it was not given. */
const ruleOf = node => ops[node.op].rule.filter(line => !absent(node).has(/^ct_(\w+) =/.exec(line)?.[1]));
const link = (text, go, label) => el("button", {type: "button", class: "link", onclick: go, "aria-label": label}, text);
const named = i => `${i} ${nodes[i].op}`;
/** Where an argument comes from or a cotangent goes. */
function reference([kind, which]) {
  if (kind === "node") return link(named(which), () => show(stepOf(which)));
  if (kind === "leaf") return link(leaves[which].name, () => showLeaf(which));
  return el("span", {class: "note"}, kind === "outside" ? `${which}, outside this tape` : constant(which));
}
const constant = said => said !== "" && Number.isFinite(Number(said)) ? number(Number(said)) : said;
const valueOf = ([kind, which]) => kind === "node" ? nodes[which].value : kind === "leaf" ? leaves[which].value : null;

function heading(node, i, kind, which) {
  const twin = node && (kind === FORWARD ? pullSteps[i].length : true);
  return [
    el("p", {class: "place"}, el("span", {class: "pass"}, which),
      el("span", {}, `step ${now.step + 1} of ${steps.length}`),
      twin && link(kind === FORWARD ? "its rule in the backward pass" : "its forward step", () => show(stepOf(i, true)))),
    el("h2", {}, el("span", {class: "number"}, i ?? ""), " ", node ? node.op : pulls[steps[now.step][1]].op),
    node && el("p", {class: "from"}, node.module && [node.module, " · "], el("code", {"data-line": ""}, node.line),
      node.equation && [" · ", node.equation], " · ", node.on,
      node.code && [el("br"), el("code", {class: "source"}, node.code)])];
}

function memory(held, text) {
  const most = Math.max(1, ...steps.map(step => step[2]));
  return [el("h3", {}, "Memory"), el("p", {style: "margin: 0"}, text),
    el("div", {class: "bar", "aria-hidden": "true"}, el("i", {style: `width: ${100 * held / most}%`}))];
}

function params(node) {
  const given = Object.entries(node.params);
  return given.length ? el("dl", {class: "params"}, given.map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value)))) : null;
}

function forwardPanel(i) {
  const node = nodes[i], names = namesOf(node), held = steps[now.step][2];
  const given = node.inputs.filter(([, kind, which]) => kind !== "constant" || which !== null);
  return [
    ...heading(node, i, FORWARD, "forward"),
    formula([ops[node.op].formula], names), params(node), composition(node.composition, node.op),
    given.length ? [el("h3", {}, "Arguments"), el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": "Arguments"},
      el("table", {class: "inputs"},
        el("tr", {}, ["", "from", "shape", "norm"].map(name => el("th", {scope: "col"}, name))),
        given.map(([name, ...from]) => {
          const s = valueOf(from), known = s === null || s === undefined ? null : snapshots[s];
          const shape = from[0] === "node" ? nodes[from[1]].shape : from[0] === "leaf" ? leaves[from[1]].shape : null;
          return el("tr", {}, el("td", {class: "math"}, el("var", {}, name)), el("td", {}, reference(from)),
            el("td", {}, shape ? times(shape) : ""), el("td", {}, known ? number(known.norm) : ""));
        })))] : null,
    node.attention === null ? null : [el("h3", {}, "Attention weights ", el("span", {class: "math"}, el("var", {}, "A"))),
      attention(node.attention)],
    el("h3", {}, "Value"), shown(node.value),
    el("h3", {}, "Rule"), formula(ruleOf(node), names, true),
    memory(held, `${node.kept ? `It keeps ${bytes(node.kept)} for its rule` : "It keeps nothing"}; held so far: ${bytes(held)}.`),
    uses[i].length ? [el("h3", {}, "Used by"), el("p", {style: "margin: 0"}, [...new Set(uses[i])].map((user, k) =>
      [k ? ", " : "", link(named(user), () => show(stepOf(user)))]))] : null];
}

function backwardPanel(at) {
  const pull = pulls[at], node = pull.node === null ? null : nodes[pull.node], held = steps[now.step][2];
  const which = "backward" + (runs > 1 ? ` ${pull.run}` : "") + (pull.depth ? ", within a checkpoint" : "");
  const names = node ? namesOf(node) : [];
  return [
    ...heading(node, pull.node, BACKWARD, which),
    node && formula(ruleOf(node), names), node && params(node),
    el("h3", {}, "Cotangent in"), el("div", {class: "cotangent"}, shown(pull.ct)),
    el("h3", {}, pull.results.length > 1 ? "Cotangents out" : "Cotangent out"),
    el("div", {class: "results"}, pull.results.map(result => el("div", {class: "result"},
      el("p", {class: "to"}, result.argument && el("span", {class: "math"}, maths(`ct_${result.argument}`, names)),
        el("span", {}, "to ", reference(result.to))),
      result.rule && el("p", {class: "math", style: "margin: 0"}, maths(result.rule, names)),
      result.axes.length ? el("p", {class: "note", style: "margin: 4px 0 0"},
        `Summed over ${result.axes.length > 1 ? "axes" : "axis"} ${result.axes.join(", ")}, where the forward pass had broadcast.`) : null,
      result.added ? el("p", {class: "note", style: "margin: 4px 0 0"}, "Added to what had come there before.") : null,
      shown(result.ct, pull.results.length > 1 ? 4 : undefined)))),
    pull.results.length ? null : el("p", {class: "note"}, "None: no argument asked for one."),
    memory(held, `Held after this step: ${bytes(held)}${node && node.kept ? `; it had kept ${bytes(node.kept)}` : ""}.`),
    node && el("details", {}, el("summary", {}, "What it computed"), formula([ops[node.op].formula], names, true),
      el("div", {style: "margin-top: 14px"}, shown(node.value)),
      node.attention === null ? null : [el("h3", {}, "Attention weights"), attention(node.attention)])];
}

function leafPanel(i) {
  const leaf = leaves[i], users = nodes.map((_, k) => k).filter(k => leavesOf(k).includes(i));
  return [
    el("p", {class: "place"}, el("span", {class: "pass"}, "leaf"), link("back to the step", () => show(now.step))),
    el("h2", {}, leaf.name), el("p", {class: "from"}, `${times(leaf.shape)} · ${leaf.dtype}`),
    el("h3", {}, "Value"), shown(leaf.value),
    el("h3", {}, "Gradient"), leaf.gradient === null && tape.values
      ? el("p", {class: "note"}, "No backward pass on this tape reached it.") : shown(leaf.gradient),
    el("h3", {}, "Used by"), el("p", {style: "margin: 0"}, users.map((user, k) =>
      [k ? ", " : "", link(named(user), () => show(stepOf(user)))]))];
}

/** The reference of a fused op, opened on demand; a fused op in it opens in its turn. */
function composition(index, op) {
  if (index === null) return null;
  const {nodes: inner, whole} = compositions[index];
  const details = el("details", {class: "composition", ontoggle: event => {
    if (event.target !== details || !details.open || details.children.length > 1) return;
    details.append(el("ol", {class: "listing"}, inner.map((node, i) => el("li", {},
      el("div", {class: "row"}, el("span", {class: "index"}, i), el("span", {}, node.op),
        el("span", {class: "math"}, maths(node.formula, node.names)),
        el("span", {class: "shape"}, node.shape && times(node.shape)),
        el("span", {class: "used"}, "of ", node.from.map(constant).join(", "), node.equation && ` · ${node.equation}`,
          Object.entries(node.params).map(([name, value]) => ` · ${name} ${value}`))),
      composition(node.composition, node.op)))),
      whole ? "" : el("p", {class: "note"}, "Listed for smaller arrays, on which it was run again."));
  }}, el("summary", {}, `${op} is fused: open its reference, ${plural(inner.length, "plain node")}`));
  return details;
}

// --------------------------------------------------------------------------------------------- steps and time

function show(step, {quiet = false} = {}) {
  now.step = Math.max(0, Math.min(steps.length - 1, step));
  now.leaf = null;
  const [kind, index, held] = steps[now.step];
  document.body.className = kind === FORWARD ? "is-forward" : "is-backward";
  render(kind === FORWARD ? forwardPanel(index) : backwardPanel(index));
  drawGraph();
  markGraph(true);
  $("slider").value = now.step;
  const node = focusNode() < 0 ? null : nodes[focusNode()];
  const s = snapshots[kind === FORWARD ? index !== null && nodes[index].value : pulls[index].ct];
  const words = `Step ${now.step + 1} of ${steps.length}, ${kind === FORWARD ? "forward" : "backward"}: `
    + (node ? `${named(focusNode())}${node.module ? " in " + node.module : ""}, ${times(node.shape)}` : pulls[index].op)
    + (s ? `, ${kind === FORWARD ? "" : "cotangent "}norm ${number(s.norm)}` : "");
  $("slider").setAttribute("aria-valuetext", words);
  if (!quiet) $("live").textContent = words;
  $("legend").querySelector(".held").textContent = `${bytes(held)} held`;
  try { history.replaceState(null, "", `#${now.step + 1}`); } catch { /* a page in a frame may not */ }
}

function showLeaf(i) {
  now.leaf = i;
  pause();
  render(leafPanel(i));
  markGraph();
  $("live").textContent = `Leaf ${leaves[i].name}, ${times(leaves[i].shape)}`;
}

function render(parts) {
  const open = $("panel").querySelector("details.composition")?.open;
  $("panel").replaceChildren(...parts.flat(9).filter(Boolean));
  $("panel").scrollTop = 0;
  if (open) $("panel").querySelector("details.composition")?.setAttribute("open", "");
}

function pause() {
  clearInterval(now.playing);
  now.playing = 0;
  $("play").textContent = "▶";
  $("play").setAttribute("aria-label", "Play");
}
function play() {
  if (now.playing) return pause();
  if (now.step === steps.length - 1) show(0);
  $("play").textContent = "❚❚";
  $("play").setAttribute("aria-label", "Pause");
  now.playing = setInterval(() => {
    show(now.step + 1, {quiet: true});
    if (now.step === steps.length - 1) pause();
  }, 700);
}

/** The memory held as an area over the steps; the ground tells forward from backward. */
function drawTime() {
  const n = steps.length, most = Math.max(1, ...steps.map(step => step[2])), parts = [];
  for (let from = 0; from < n;) {
    let to = from;
    while (to < n && steps[to][0] === steps[from][0]) to++;
    const letter = steps[from][0] === FORWARD ? "f" : "b";
    const heights = steps.slice(from, to).map(([, , held], k) => {
      const y = 38 - 34 * held / most;
      return `L${from + k} ${y}L${from + k + 1} ${y}`;
    });
    parts.push(svg("rect", {class: `ground ${letter}`, x: from, y: 0, width: to - from, height: 40}),
      svg("path", {class: `area ${letter}`, d: `M${from} 40${heights.join("")}L${to} 40Z`}),
      svg("rect", {class: letter, x: from, y: 38, width: to - from, height: 2}));
    from = to;
  }
  $("memory").append(svg("svg", {viewBox: `0 0 ${n} 40`, preserveAspectRatio: "none"}, parts));
  $("slider").max = n - 1;
  const forward = steps.filter(([kind]) => kind === FORWARD).length;
  $("legend").append(el("b", {class: "forward"}, `forward, ${forward}`), el("span", {class: "held"}),
    n > forward ? el("b", {class: "backward"}, `${n - forward}, backward`) : el("span", {}, "no backward pass"));
}

// --------------------------------------------------------------------------------------------------- finding

const findable = [
  ...nodes.map((node, i) => ({text: named(i), where: node.module || node.line, go: () => show(stepOf(i))})),
  ...leaves.map((leaf, i) => ({text: leaf.name, where: times(leaf.shape), go: () => showLeaf(i)})),
];
(function modules(box) {
  for (const item of box.items) if (item.items) {
    findable.push({text: item.path, where: plural(item.last - item.first + 1, "node"), go: () => {
      show(stepsOfNode[item.first][0]);
      setOpen(item, true);
    }});
    modules(item);
  }
})(root);
let matches = [], pointed = 0;

function find() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean), rank = thing => {
    const said = thing.text.toLowerCase();
    const starts = said.startsWith(words[0]) || said.includes(" " + words[0]) || thing.where.endsWith("." + words[0]);
    return starts ? 0 : said.includes(words[0]) ? 1 : 2;
  };
  matches = words.length ? findable.filter(thing => words.every(word =>
    `${thing.text} ${thing.where}`.toLowerCase().includes(word))).sort((a, b) => rank(a) - rank(b)).slice(0, 40) : [];
  pointed = 0;
  list();
}
function list() {
  $("found").hidden = !$("search").value.trim();
  $("search").setAttribute("aria-expanded", !$("found").hidden);
  $("found").replaceChildren(...matches.map((thing, i) => el("li", {id: `found-${i}`, role: "option",
    "aria-selected": i === pointed, onmousedown: event => {
      event.preventDefault();
      take(i);
    }}, el("span", {}, thing.text), el("span", {class: "where"}, thing.where))),
    matches.length ? "" : el("li", {role: "option", "aria-disabled": "true"}, "Nothing of that name"));
  if (matches.length) $("search").setAttribute("aria-activedescendant", `found-${pointed}`);
  else $("search").removeAttribute("aria-activedescendant");
  $("found").children[pointed]?.scrollIntoView({block: "nearest"});
}
function take(i) {
  const thing = matches[i];
  $("search").value = "";
  list();
  if (!thing) return;
  pause();
  thing.go();
  $("panel").focus({preventScroll: true});
}
$("search").addEventListener("input", find);
$("search").addEventListener("blur", () => { $("found").hidden = true; });
$("search").addEventListener("keydown", event => {
  if (event.key === "Enter") take(pointed);
  else if (event.key === "Escape") {
    $("search").value = "";
    list();
    $("search").blur();
  } else if (matches.length && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
    pointed = (pointed + (event.key === "ArrowDown" ? 1 : matches.length - 1)) % matches.length;
    list();
  } else return;
  event.preventDefault();
});

// ------------------------------------------------------------------------------------------------------ start

document.addEventListener("keydown", event => {
  const at = event.target;
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || at === $("search")) return;
  if (at.classList?.contains("scroll") && at.scrollWidth > at.clientWidth && event.key.startsWith("Arrow")) return;
  const pressed = at.closest?.("button, summary, label, [type=checkbox]");
  const box = drawn.filter(({item}) => item && item.items && holds(item, focusNode())).at(-1);
  const does = {
    ArrowRight: () => show(now.step + 1), ArrowLeft: () => show(now.step - 1), Home: () => show(0),
    End: () => show(steps.length - 1), "/": () => $("search").focus(), "?": () => $("help").showModal(),
    b: () => focusNode() >= 0 && show(stepOf(focusNode(), true)),
    " ": pressed ? null : play,
    Enter: pressed || !box ? null : () => setOpen(box.item, !isOpen(box.item)),
  }[event.key];
  if (!does) return;
  event.preventDefault();
  if (event.key !== " ") pause();
  does();
});
$("slider").addEventListener("input", () => { pause(); show(Number($("slider").value)); });
$("back").addEventListener("click", () => { pause(); show(now.step - 1); });
$("next").addEventListener("click", () => { pause(); show(now.step + 1); });
$("play").addEventListener("click", play);
$("ask").addEventListener("click", () => $("help").showModal());
$("follow").addEventListener("change", () => {
  following = $("follow").checked;
  drawGraph();
  markGraph(true);
});
for (const [id, open] of [["unfold", true], ["fold", false]])
  $(id).addEventListener("click", () => {
    (function each(box) {
      for (const item of box.items) if (item.items) {
        chosen.set(item.key, open);
        each(item);
      }
    })(root);
    drawGraph();
    markGraph(true);
  });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  now.leaf === null ? show(now.step, {quiet: true}) : showLeaf(now.leaf));

$("summary").textContent = [plural(nodes.length, "node"), `${leaves.length} ${leaves.length === 1 ? "leaf" : "leaves"}`,
  runs ? `${runs} backward pass${runs === 1 ? "" : "es"}` : ""].filter(Boolean).join(" · ");
drawTime();
show((parseInt(location.hash.slice(1), 10) || 1) - 1, {quiet: true});
