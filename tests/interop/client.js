// Drives one stopped process as VS Code does, with the client that Microsoft tests debug adapters with.
//
//     node client.js PORT LINE ASSIGNMENT
//
// Attaches to 127.0.0.1:PORT with VS Code's defaults (justMyCode), reads the locals where it has stopped, steps once,
// runs ASSIGNMENT in the frame, lets it go on to a point that the editor sets at LINE of the same file, reads the locals
// there, lets it go on and hangs up. What it saw is one JSON object on stdout.
"use strict";

const { DebugClient } = require("@vscode/debugadapter-testsupport");

const LIMIT_MS = 120000;

async function main(port, line, assignment) {
  const client = new DebugClient("", "", "debugpy");
  await client.start(port); // with a port the client itself limits no wait
  const seen = { capabilities: {}, stops: [] };

  let stopped = client.waitForEvent("stopped", LIMIT_MS);
  seen.capabilities = (await client.initializeRequest({
    adapterID: "debugpy", clientID: "vscode", linesStartAt1: true, columnsStartAt1: true, pathFormat: "path",
  })).body;
  const initialized = client.waitForEvent("initialized", LIMIT_MS);
  const attached = client.attachRequest({ name: "vime", type: "debugpy", request: "attach", justMyCode: true });
  await initialized;
  await client.setExceptionBreakpointsRequest({ filters: ["uncaught"] });
  await client.configurationDoneRequest();
  await attached;

  const first = await here(client, await stopped);
  seen.stops.push(first);

  stopped = client.waitForEvent("stopped", LIMIT_MS);
  await client.nextRequest({ threadId: first.thread });
  const second = await here(client, await stopped);
  seen.stops.push(second);
  await client.evaluateRequest({ expression: assignment, frameId: second.frame, context: "repl" });

  const set = await client.setBreakpointsRequest({ source: { path: first.file }, breakpoints: [{ line }] });
  seen.verified = set.body.breakpoints.map((point) => point.verified);
  stopped = client.waitForEvent("stopped", LIMIT_MS);
  await client.continueRequest({ threadId: first.thread });
  seen.stops.push(await here(client, await stopped));

  await client.continueRequest({ threadId: first.thread });
  await client.disconnectRequest({ terminateDebuggee: false });
  return seen;
}

async function here(client, event) {
  const thread = event.body.threadId;
  const frame = (await client.stackTraceRequest({ threadId: thread, startFrame: 0, levels: 1 })).body.stackFrames[0];
  const scopes = (await client.scopesRequest({ frameId: frame.id })).body.scopes;
  const locals = scopes.find((scope) => scope.name === "Locals");
  const rows = (await client.variablesRequest({ variablesReference: locals.variablesReference })).body.variables;
  return {
    thread, frame: frame.id, reason: event.body.reason, file: frame.source.path, line: frame.line, name: frame.name,
    locals: Object.fromEntries(rows.map((row) => [row.name, row.value])),
  };
}

const [port, line, assignment] = process.argv.slice(2);
setTimeout(() => { console.error("not done within the limit"); process.exit(1); }, LIMIT_MS).unref();
main(Number(port), Number(line), assignment).then(
  (seen) => { console.log(JSON.stringify(seen)); process.exit(0); },
  (error) => { console.error((error && error.stack) || String(error)); process.exit(1); },
);
