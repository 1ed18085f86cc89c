(* The best keys of a row leave the least of all sets that have no more keys.
   Used in docs/soundness.md under "The promise". *)

Require Import Certk.sums.

Section Best.
Context {key : Type}.
Variable keys : list key.

Definition count (S : key -> bool) : nat := length (filter S keys).

Lemma count_is_total S : INR (count S) = total keys (part S (fun _ => 1)).
Proof.
  unfold count. induction keys as [|k rest IH]; [reflexivity|].
  simpl. unfold part at 1. destruct (S k).
  - simpl length. rewrite S_INR, IH. ring.
  - rewrite IH. ring.
Qed.

Variable w : key -> R.
Hypothesis weights : forall k, In k keys -> 0 <= w k.

(* No key outside weighs more than one inside. *)
Definition best_of best :=
  forall i j, In i keys -> In j keys -> best i = true -> best j = false -> w j <= w i.

(* A bound of all outside that none inside is below. *)
Lemma threshold best : best_of best ->
  exists t, 0 <= t /\ (forall k, In k keys -> if best k then t <= w k else w k <= t).
Proof.
  intros O.
  assert (top : forall some, (forall k, In k some -> In k keys) ->
    exists t, 0 <= t /\ (forall k, In k some -> best k = false -> w k <= t)
      /\ (forall i, In i keys -> best i = true -> t <= w i)).
  { induction some as [|k rest IH]; intros sub.
    - exists 0. split; [lra|]. split; [easy|]. auto.
    - destruct IH as [t [T0 [Tout Tin]]]; [intros; apply sub; now right|].
      destruct (best k) eqn:Bk.
      + exists t. split; [easy|]. split; [|easy]. intros j [->|J] Bj; [congruence | auto].
      + exists (Rmax t (w k)). split; [eapply Rle_trans; [exact T0 | apply Rmax_l]|]. split.
        * intros j [->|J] Bj; [apply Rmax_r|]. eapply Rle_trans; [now apply Tout | apply Rmax_l].
        * intros i I Bi. apply Rmax_lub; [auto|]. apply O; auto. apply sub. now left. }
  destruct (top keys) as [t [T0 [Tout Tin]]]; [easy|].
  exists t. split; [easy|]. intros k I. destruct (best k) eqn:Bk; auto.
Qed.

Theorem smaller_sets best S : best_of best -> (count S <= count best)%nat ->
  total keys (part (out best) w) <= total keys (part (out S) w).
Proof.
  intros O C. destruct (threshold best O) as [t [T0 T]].
  apply le_INR in C. rewrite !count_is_total in C.
  pose proof (total_part S keys w). pose proof (total_part best keys w).
  (* A key of S that is not among the best has at most t, one of the best that is not in S at least t. *)
  assert (total keys (part S w) - total keys (part best w)
          <= t * (total keys (part S (fun _ => 1)) - total keys (part best (fun _ => 1)))).
  { rewrite <- !total_minus, <- total_times. apply total_le. intros k I. specialize (T k I).
    unfold part. destruct (S k), (best k); lra. }
  nra.
Qed.
End Best.
