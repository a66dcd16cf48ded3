// OpenAI's SDK for JavaScript with the Live API: text to speak about, speech in answer.pcm (24 kHz,
// int16). Usage and certificates: see openai_typed.mjs.

import { writeFileSync } from "node:fs";
import OpenAI from "openai";
import { LiveWS } from "openai/resources/live/ws";

const [url = "https://127.0.0.1:30000", about = "Greet the user."] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.API_KEY ?? "none" });
const model = (await client.models.list()).data[0].id;
const call = new LiveWS(client);
const sound = [];
let pause = 0; // packets of silence, of 100 ms each, since the last sound

call.send({ type: "session.start", session: { model, instructions: "Be brief." } });
call.on("session.started", () => {
  call.send({ type: "session.commentary.append", content: about, delegation_id: null });
});
call.on("session.output_audio.delta", ({ delta }) => {
  const packet = Buffer.from(delta, "base64");
  pause = packet.some((byte) => byte) ? 0 : pause + 1;
  if (pause === 0 || sound.length) sound.push(packet);
  if (sound.length && pause === 10) call.send({ type: "session.close" });
});
call.on("session.output_transcript.delta", ({ delta }) => process.stdout.write(delta));
call.on("error", (error) => {
  console.error(error.message);
  process.exit(1);
});
call.on("session.closed", ({ reason }) => {
  const pcm = Buffer.concat(sound.slice(0, -10));
  writeFileSync("answer.pcm", pcm);
  console.log(`\n${reason}: ${(pcm.length / 48000).toFixed(1)} s of sound in answer.pcm`);
  call.close();
});
