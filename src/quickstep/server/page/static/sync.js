// Conversations on the server: files of the API key, with the purpose `user_data`, each named by its
// conversation and the time of its last change. A change is a new file, then the older ones are deleted.
import { deleteAt, getJson, postForm } from "./api.js";

const PURPOSE = "user_data";
const NAME = /^conversation-(\d+-\d+)-(\d+)\.json$/;

/** The newest file of each conversation, {id, changed, older}, by the conversation's id. */
async function files() {
  const newest = new Map();
  for (const { id, filename } of (await getJson(`v1/files?purpose=${PURPOSE}`)).data) {
    const [, name, time] = NAME.exec(filename) ?? [];
    if (!name) continue;
    const file = { id, changed: Number(time), older: [] };
    const other = newest.get(name);
    const [first, second] = !other || other.changed < file.changed ? [file, other] : [other, file];
    first.older.push(...(second ? [second.id, ...second.older] : []));
    newest.set(name, first);
  }
  return newest;
}

const removeFile = (id) => deleteAt(`v1/files/${id}`).catch(() => {});

export async function upload(conversation) {
  const form = new FormData();
  const name = `conversation-${conversation.id}-${conversation.changed}.json`;
  form.append("purpose", PURPOSE);
  form.append("file", new Blob([JSON.stringify(conversation)], { type: "application/json" }), name);
  await postForm("v1/files", form);
  const file = (await files()).get(conversation.id);
  await Promise.all((file?.older ?? []).map(removeFile));
}

export async function removeThere(conversation) {
  const file = (await files()).get(conversation.id);
  if (file) await Promise.all([file.id, ...file.older].map(removeFile));
}

/**
 * What of `conversations` has to change: {newer, removed}. Those that are not on the server, or older there,
 * are uploaded. One that was there and is not any more was deleted in another browser.
 */
export async function synchronize(conversations) {
  const there = await files();
  const here = new Map(conversations.map((item) => [item.id, item]));
  const newer = [];
  for (const [id, file] of there) {
    if (here.get(id)?.changed >= file.changed) continue;
    const content = await getJson(`v1/files/${file.id}/content`);
    if (typeof content.messages === "object") newer.push({ ...content, id, changed: file.changed, isOnServer: true });
  }
  const removed = conversations.filter((item) => item.isOnServer && !there.has(item.id));
  for (const item of conversations) {
    if (removed.includes(item) || there.get(item.id)?.changed >= item.changed) continue;
    item.isOnServer = true;
    await upload(item);
  }
  return { newer, removed };
}
