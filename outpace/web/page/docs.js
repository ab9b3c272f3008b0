// The reference: every route of openapi.json with its fields, without anything from elsewhere.

import { $, element } from "./dom.js";
import { prepareTheme } from "./theme.js";

const MAX_LEVELS = 3; // of objects in objects

let schema;

const resolve = (part) => (part?.$ref ? { name: part.$ref.split("/").pop(), ...schema.components.schemas[part.$ref.split("/").pop()] } : part ?? {});

/** A schema in a few words, such as "string | null" or "list of integer". */
function typeOf(given, level = 0) {
  const part = resolve(given);
  const several = part.anyOf ?? part.oneOf;
  if (several) return [...new Set(several.map((each) => typeOf(each, level)))].join(" | ");
  if (part.const !== undefined) return JSON.stringify(part.const);
  if (part.enum) return part.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (part.type === "array") return level > MAX_LEVELS ? "list" : `list of ${typeOf(part.items, level + 1)}`;
  if (part.name) return part.name;
  return part.type ?? "any";
}

function limits(part) {
  const found = [];
  for (const [key, sign] of [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]]) {
    if (part[key] !== undefined) found.push(`${sign} ${part[key]}`);
  }
  return found;
}

function about(given, isRequired) {
  const part = resolve(given);
  const words = [];
  if (isRequired) words.push("required");
  if (part.default !== undefined && part.default !== null && typeof part.default !== "object") words.push(`default ${JSON.stringify(part.default)}`);
  for (const each of [part, ...(part.anyOf ?? []).map(resolve)]) words.push(...limits(each));
  const text = given.description ?? part.description;
  return [words.join(", "), text].filter(Boolean).join(". ");
}

function objectsIn(given, found = new Map(), level = 0) {
  const part = resolve(given);
  if (part.name && part.properties && level > 0) {
    if (found.has(part.name)) return found;
    found.set(part.name, part);
  }
  if (level > MAX_LEVELS + 2) return found;
  const inner = [...Object.values(part.properties ?? {}), part.items, ...(part.anyOf ?? []), ...(part.oneOf ?? [])];
  for (const each of inner) if (each) objectsIn(each, found, level + 1);
  return found;
}

function fieldTable(part) {
  const rows = Object.entries(part.properties ?? {}).map(([name, field]) => element("tr", {},
    element("td", {}, name), element("td", {}, typeOf(field)), element("td", {}, about(field, part.required?.includes(name)))));
  if (!rows.length) return element("p", { class: "note" }, typeOf(part));
  const head = element("tr", {}, ...["field", "type", "meaning"].map((name) => element("th", { scope: "col" }, name)));
  return element("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Fields" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

function schemaBlocks(title, given) {
  const part = resolve(given);
  const blocks = [element("h3", {}, title)];
  if (part.description) blocks.push(element("p", { class: "note" }, part.description));
  blocks.push(fieldTable(part));
  for (const [name, inner] of objectsIn(given)) blocks.push(element("h3", {}, name), fieldTable(inner));
  return blocks;
}

function content(operation) {
  const body = element("div", { class: "body" });
  if (operation.description) body.append(element("p", {}, operation.description));
  for (const each of operation.parameters ?? []) body.append(element("p", {}, element("code", {}, each.name), ` in the ${each.in}: ${typeOf(each.schema)}`));
  const asked = operation.requestBody?.content?.["application/json"]?.schema;
  if (asked) body.append(...schemaBlocks("Request", asked));
  const answered = operation.responses?.["200"]?.content?.["application/json"]?.schema;
  if (answered) body.append(...schemaBlocks("Reply", answered));
  const others = Object.entries(operation.responses ?? {}).filter(([status]) => status !== "200");
  if (others.length) {
    body.append(element("h3", {}, "Other replies"), element("ul", {}, ...others.map(([status, reply]) => element("li", {}, `${status}: ${reply.description}`))));
  }
  return body;
}

function route(path, verb, operation) {
  const heading = element("summary", {}, element("span", { class: "verb" }, verb.toUpperCase()), element("span", { class: "path" }, path),
    element("span", { class: "note" }, operation.summary ?? ""));
  const details = element("details", { class: "route" }, heading);
  // Fields are written when they are looked at: all of them at once would be thousands of rows.
  details.addEventListener("toggle", () => { if (details.childElementCount === 1) details.append(content(operation)); });
  return details;
}

async function show() {
  prepareTheme($("theme"));
  const place = $("routes");
  try {
    schema = await (await fetch("openapi.json")).json();
  } catch {
    place.append(element("p", { class: "notice" }, "openapi.json could not be read; reload the page."));
    return;
  }
  $("summary").prepend(`${schema.info.title} ${schema.info.version}. ${schema.info.summary ?? ""} `);
  const groups = new Map();
  for (const [path, verbs] of Object.entries(schema.paths)) {
    for (const [verb, operation] of Object.entries(verbs)) {
      const tag = operation.tags?.[0] ?? "other";
      groups.set(tag, [...(groups.get(tag) ?? []), route(path, verb, operation)]);
    }
  }
  for (const [tag, routes] of groups) place.append(element("h2", {}, tag), ...routes);
  place.removeAttribute("aria-busy");
}

show();
