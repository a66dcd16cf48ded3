// Keys and client secrets. A key is exchanged for a secret at once, and sessions open with the
// secret. The key stays in memory only, for requests: /metrics, voices, calls over WebRTC.

const SECRET_S = 7200; // the server's maximum
const MARGIN_S = 60;
const UNKNOWN = "the server does not know this key";

let secret = null; // {value, until: ms}
let authorization = {};

export class KeyWanted extends Error {}

// What opens a session: the subprotocols of its socket, or the headers of a call's request.
export async function admission() {
  if (secret && Date.now() < secret.until) {
    const protocols = ["realtime", `openai-insecure-api-key.${secret.value}`];
    return { protocols, headers: authorization };
  }
  const answer = await ask("/v1/models");
  if (answer.status === 401) throw new KeyWanted("a key, please");
  if (!answer.ok) throw new Error(`the server returned status ${answer.status}`);
  return { protocols: ["realtime"], headers: {} };
}

// Names of the model's voices; [] while a key is missing.
export async function voices() {
  const answer = await fetch("/v1/audio/voices", { headers: authorization });
  return answer.ok ? (await answer.json()).voices.map(({ id }) => id) : [];
}

export function counts() {
  return fetch("/metrics", { headers: authorization });
}

export async function useKey(key) {
  // Headers hold only printable ASCII.
  if (!/^[\x20-\x7e]+$/.test(key)) throw new KeyWanted(UNKNOWN);
  const bearer = { Authorization: `Bearer ${key}` };
  const answer = await ask("/v1/realtime/client_secrets", {
    method: "POST",
    headers: { ...bearer, "Content-Type": "application/json" },
    body: JSON.stringify({ expires_after: { anchor: "created_at", seconds: SECRET_S } }),
  });
  if (answer.status === 401) throw new KeyWanted(UNKNOWN);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error.message);
  // Relative to this clock: those of server and browser may differ.
  authorization = bearer;
  secret = { value: body.value, until: Date.now() + (SECRET_S - MARGIN_S) * 1000 };
}

// Checks the secret after a socket did not open, for which browsers give no reason. A restarted
// server has deleted its secrets; a server that is unreachable keeps them.
export async function doubt() {
  if (secret && (await ask("/v1/models")).status === 401) {
    secret = null;
    throw new KeyWanted("a key, please");
  }
}

async function ask(path, options) {
  try {
    return await fetch(path, options);
  } catch {
    throw new Error("the server is unreachable");
  }
}
