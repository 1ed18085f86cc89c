(* One set for many rows: no set within every budget has fewer keys than a mixture of the rows allows.
   Used in docs/soundness.md under "One set for many rows". *)

Require Import Lia Certk.sums.

Section KeepSet.
Context {key row : Type}.
Variable keys : list key.
Variable rows : list row.
(* The weight of a key in a row, the budget and the multiplier of a row. *)
Variable p : row -> key -> R.
Variables budget y : row -> R.
Hypothesis weights : forall r k, In r rows -> In k keys -> 0 <= p r k.
Hypothesis multipliers : forall r, In r rows -> 0 <= y r.

Definition mixture (k : key) : R := total rows (fun r => y r * p r k).
Definition mixed_budget : R := total rows (fun r => y r * budget r).
Definition count (S : key -> bool) : nat := length (filter S keys).

Lemma count_is_total S : INR (count S) = total keys (part S (fun _ => 1)).
Proof.
  clear weights. unfold count. induction keys as [|k rest IH]; [reflexivity|].
  simpl. unfold part at 1. destruct (S k).
  - simpl length. rewrite S_INR, IH. ring.
  - rewrite IH. ring.
Qed.

Lemma mixture_nonneg k : In k keys -> 0 <= mixture k.
Proof. intros I. apply total_nonneg. intros r J. apply Rmult_le_pos; auto. Qed.

(* A set within budget in every row is within the mixed budget. *)
Lemma within_mixed_budget S :
  (forall r, In r rows -> total keys (part (out S) (p r)) <= budget r) ->
  total keys (part (out S) mixture) <= mixed_budget.
Proof.
  intros B. unfold mixed_budget.
  rewrite (total_ext _ _ (fun k => total rows (fun r => y r * part (out S) (p r) k))).
  - rewrite total_swap. apply total_le. intros r J. rewrite total_times.
    apply Rmult_le_compat_l; auto.
  - intros k _. unfold part, mixture. destruct (out S k); [reflexivity|].
    rewrite (total_ext _ _ (fun _ => 0)) by (intros; ring). now rewrite total_zero.
Qed.

(* A bound of all outside a set that none inside is below. *)
Lemma threshold best :
  (forall i j, In i keys -> In j keys -> best i = true -> best j = false -> mixture j <= mixture i) ->
  exists t, 0 <= t /\ (forall k, In k keys -> if best k then t <= mixture k else mixture k <= t).
Proof.
  intros O.
  assert (top : forall some, (forall k, In k some -> In k keys) ->
    exists t, 0 <= t /\ (forall k, In k some -> best k = false -> mixture k <= t)
      /\ (forall i, In i keys -> best i = true -> t <= mixture i)).
  { induction some as [|k rest IH]; intros sub.
    - exists 0. split; [lra|]. split; [easy|]. intros. now apply mixture_nonneg.
    - destruct IH as [t [T0 [Tout Tin]]]; [intros; apply sub; now right|].
      destruct (best k) eqn:Bk.
      + exists t. split; [easy|]. split; [|easy]. intros j [->|J] Bj; [congruence | auto].
      + exists (Rmax t (mixture k)). split; [eapply Rle_trans; [exact T0 | apply Rmax_l]|]. split.
        * intros j [->|J] Bj; [apply Rmax_r|]. eapply Rle_trans; [now apply Tout | apply Rmax_l].
        * intros i I Bi. apply Rmax_lub; [auto|]. apply O; auto. apply sub. now left. }
  destruct (top keys) as [t [T0 [Tout Tin]]]; [easy|].
  exists t. split; [easy|]. intros k I. destruct (best k) eqn:Bk; auto.
Qed.

(* Where the best keys of the mixture leave more than the mixed budget, every set within budget has more keys than they are. *)
Theorem fewest_keys best S :
  (forall i j, In i keys -> In j keys -> best i = true -> best j = false -> mixture j <= mixture i) ->
  mixed_budget < total keys (part (out best) mixture) ->
  (forall r, In r rows -> total keys (part (out S) (p r)) <= budget r) ->
  (count best < count S)%nat.
Proof.
  intros O L B. pose proof (within_mixed_budget S B) as W.
  destruct (threshold best O) as [t [T0 T]].
  apply Nat.nle_gt. intros C. apply le_INR in C. rewrite !count_is_total in C.
  pose proof (total_part S keys mixture). pose proof (total_part best keys mixture).
  (* Each key of S that is not among the best has at most t, each of the best that is not in S at least t. *)
  assert (total keys (part S mixture) - total keys (part best mixture)
          <= t * (total keys (part S (fun _ => 1)) - total keys (part best (fun _ => 1)))).
  { rewrite <- !total_minus, <- total_times. apply total_le. intros k I. specialize (T k I).
    unfold part. destruct (S k), (best k); lra. }
  nra.
Qed.
End KeepSet.
