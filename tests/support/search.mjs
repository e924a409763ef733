// Runs the search of a built documentation site, with the site's own script and index, for the queries in the arguments.
// Prints the addresses of the pages that it finds, in its order, as JSON by query.
import fs from "node:fs";
import path from "node:path";

const [site, ...queries] = process.argv.slice(2);
const folder = path.join(site, "assets/javascripts/workers");
const script = fs.readdirSync(folder).find(name => name.startsWith("search.") && name.endsWith(".js"));
const { config, docs } = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json")));

// What the script expects of the browser: it is a worker that answers messages.
let receive, answered;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => { receive = listener; };
globalThis.postMessage = message => answered(message.data);
(0, eval)(fs.readFileSync(path.join(folder, script), "utf8"));
const ask = (type, data) => new Promise(resolve => { answered = resolve; receive({ data: { type, data } }); });

await ask(0, { config, docs, options: { suggest: true } });
const found = {};
for (const query of queries) {
  const { items } = await ask(2, query);
  found[query] = items.map(([best]) => best.location.split("#")[0]);
}
console.log(JSON.stringify(found));
